"""The forward kernel, by roles, and the merge of split rows."""
