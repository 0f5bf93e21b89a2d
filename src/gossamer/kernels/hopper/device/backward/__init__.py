"""The backward kernels: dK, dV and dQ of a walk over key tiles, and what runs before and after it.

Sliding windows are tiles of intervals: masks.py has what their keys keep, schedule/columns.py the work. dQ has three
ways, which launch/backward.py names: sums in the column kernel, by rows (query.py), and from dS that is saved
(kept.py).

The column kernel (kernel.py) walks `layout.columns`: rows of that walk are keys, its columns queries. Shapes and types
of its arguments are those of `ColumnArguments` (block.py). dk and dv are written whole.

terms: Qp is Q rounded up to 128. terms[0] is lse * log2(e), +inf for an empty row and past Q; terms[1] is
    rowsum(dout * out) - dlse, 0 past Q. So p = exp2(exponent * s - terms[0]) is 0 where nothing is kept.
dq_sum: the sum of dS K without the scale, D padded; zeroed before the launch. A tile of 64 rows is stored as its
    accumulator lies in the registers of a warpgroup: element (j * 128 + t) * 4 + 2 * r + c is row
    16 * (t // 32) + t % 32 // 4 + 8 * r, column 8 * j + 2 * (t % 4) + c, for j < D / 8, t < 128, r and c < 2.
    One tile is one contiguous block, added to by bulk reduction; only (1, 1, 1, 64 * D) floats, unread, without dQ.
ds: dS of pairs of tiles of 64 x 64, as keep.py has it, where the configuration keeps it; kept.py makes dQ of it.
work, segments, lists, lo, hi and pool: see below and column_items.py.
part_dk, part_dv: parts of split columns, without the scale, every row written; summed in slot order afterwards, times
    the scale for dk.
lengths: keys j >= lengths[b] are not attended. Their dk and dv are zero, and they add nothing to dq_sum.
before, exponent, factor: scores are s = q . k; "fold": exponent = scale * log2(e), before = 1 (any sign of the scale,
    zero too); "softcap": before = scale / softcap, exponent = softcap * log2(e). dk is multiplied by factor = scale.

An item is 16 words: batch, key head, key tile, slot (-1: not split), first segment, segments, 1, and with lengths the
keys that count (the kernel fills these in). It computes one key tile of one key head over its segments, and writes dk
and dv (or its slot of the parts). An item without segments writes zeros. Their order is that of `for_every_head` in the
`hopper.schedule.rows`.

A segment is 8 words: query head within the group of the key head (0 .. H / G - 1), row of the walk's lists in lo and
hi, then for each of full, interval and bits the first entry in `lists` and the count (as in the forward's items). An
item of a shared list has one segment a query head; a split item has the pieces of the concatenation of its heads'
lists that fall into its range. Segments with no entries are allowed.

Head sizes over 128 are wide.py's, which takes the same arguments and writes dK and dV alone: its items are the halves
of 64 keys of a key tile. dQ is then made of dS that is kept, or by rows (query.py), in both modes, and so it is for
tiles of 64 x 64.
"""
