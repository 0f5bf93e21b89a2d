"""What says the keys of a row beside its position."""

from __future__ import annotations

NOTHING, IDS, DOCUMENTS, SEQUENCES = range(4)  # ids of documents, their edges, or those of sequences of rows and keys
