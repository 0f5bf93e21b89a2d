"""alpha-entmax of rows whose supports are long: tiles of such rows, and passes over all of their scores."""
