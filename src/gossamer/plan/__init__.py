"""The plan: which way to compute a call is cheapest, and why not the others. No framework is imported here.

`problem.py` has the static facts of a call, `capability.py` the limits of an implementation and the reasons for a
refusal, `table.py` the implementations by name, `plan.py` those that compute a problem. `choice.py` takes a layout by
counted work (`estimate.py`), `partition.py` several calls over residue classes (`residue.py`) where they take less, and
`advice.py` says what would be faster.
"""
