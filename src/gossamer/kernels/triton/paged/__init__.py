"""Few queries of each sequence, whose keys lie in the pages that a table names: see `launch_paged`."""
