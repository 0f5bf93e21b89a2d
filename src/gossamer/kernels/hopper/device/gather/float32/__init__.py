"""The forward over gathered columns for float32, by products of numbers that are split in two of float16."""
