"""The limits that a user can meet, each with its reason.

Sizes that only decide the layout of a kernel or a picture are beside the code that uses them.
"""

# Larger inputs are refused, or computed by another engine.
FARTHEST = 2**40  # position, count or distance in a mask: sums of several are exact in int64
MOST_SEED = 2**63 - 1  # the largest int64, which is what kernels and torch's generators take
MOST_STEPS_BYTES = 4 * 2**30  # of all steps, which the reference holds at once
MOST_DENSE_CELLS = 2**27  # of weights formed as one matrix: 512 MB in float32
MOST_TILE_CELLS = 2**20  # of exact weights that are shown cell by cell
MOST_LESSON_TOKENS = 2048  # of `explain_text`, which holds every matrix that it shows
MOST_LESSON_FEATURES = 4096  # a matrix of a projection then has 64 MB
MOST_HEAD_SIZE = 2**16  # of `why_scale`
MOST_COMPARED_TOKENS = 1024  # of `whatif`, which keeps all attention matrices twice
MOST_PLANNED_SIZE = 2**25  # of `clearhead plan`, which counts key ranges in some seconds and GB

# Requests to the local server.
MOST_LETTERS = 200_000  # of a text
MOST_REQUEST_BYTES = 8 * MOST_LETTERS  # a letter is at most 6 bytes of JSON
MOST_REQUESTS = 8  # that run or wait for their turn
MOST_HEADS_OFF = 10_000
MOST_MASK_LETTERS = 4096

# Larger inputs are computed in parts of this size.
ENDS_AT_ONCE = 2**22  # of key ranges that are sorted: 100 MB
STRIP_CELLS = 2**21  # of the rows of a matrix: 8 MB
REPEAT_CELLS = 2**24  # of mask and bias, where a report looks for repeated tokens
TOKENS_AT_ONCE = 4096  # in the copies of a batch that effects run together
MASK_QUERIES_AT_ONCE = 256  # of a mask of bits, where a metric reads it

# Results stored for later calls.
MOST_REPEATED_CALLS = 256  # their arguments, as the kernels read them
MOST_REPEATED_RANGES = 2**12  # key ranges that are kept with each of them: 64 kB
MASKS_KEPT = 4  # edited masks, by an edit: layers take turns with a few
TOKENS_AHEAD = 256  # for which a cache reserves memory: it copies less than 1 % more

# Larger results are stored, or shown, in part.
MOST_TRACED_CELLS = 2**16  # heads x queries x keys of a layer of which every step is kept
MOST_TRACED_TOKENS = 512  # of which one head's steps are kept: 1 MB a matrix
MOST_RANKED_QUERIES = 512  # whose largest weights are kept, evenly spaced
MOST_REPEAT_QUERIES = 1024  # a mean within 0.03 of that of all, 95 times in 100
LEAST_REPEAT_QUERIES = 8  # a mean over fewer depends too much on the text
MOST_LOGITS = 2**26  # of all positions, for the next words: 270 MB
SUMMARY_PAIRS = 2**24  # of whose weights a printed matrix gives the entropy: more would delay it
MOST_SHOWN_VALUES = 4096  # of a tensor in the repr of a mask
