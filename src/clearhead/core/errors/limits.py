"""The limits that a user can meet, each with its reason.

Sizes that only decide the layout of a kernel or a picture are beside the code that uses them.
"""

# Larger inputs are refused, or computed by another engine.
FARTHEST = 2**40  # position, count or distance in a mask, so that sums are exact in int64
MOST_SEED = 2**63 - 1  # the largest int64, the type of seeds in kernels and torch's generators
MOST_STEPS_BYTES = 4 * 2**30  # the reference holds all steps at once
MOST_DENSE_CELLS = 2**27  # a matrix of weights: 512 MB in float32
MOST_TILE_CELLS = 2**20  # exact weights that are shown cell by cell
MOST_LESSON_TOKENS = 2048  # `explain_text` holds every matrix
MOST_LESSON_FEATURES = 4096  # then the matrix of a projection has 64 MB
MOST_COMPARED_TOKENS = 1024  # `whatif` holds all attention matrices twice
MOST_PLANNED_SIZE = 2**25  # `clearhead plan` counts key ranges, in a few seconds and GB

# Requests to the local server.
MOST_LETTERS = 200_000  # letters of a text
MOST_REQUEST_BYTES = 8 * MOST_LETTERS  # a letter is at most 6 bytes of JSON
MOST_REQUESTS = 8  # requests that run or wait
MOST_HEADS_OFF = 10_000
MOST_MASK_LETTERS = 4096

# Larger inputs are computed in parts of this size.
ENDS_AT_ONCE = 2**22  # ends of key ranges that are sorted: 100 MB
STRIP_CELLS = 2**21  # cells of rows of a matrix: 8 MB
ROLE_CELLS = 2**22  # weights in which a report looks for roles: 16 MB
TOKENS_AT_ONCE = 512  # tokens in the copies that effects run together; more are not faster
MASK_QUERIES_AT_ONCE = 256  # queries of a mask of bits that a metric reads

# Results stored for later calls.
MASKS_KEPT = 4  # edited masks that an edit stores, because layers alternate between a few
TOKENS_AHEAD = 256  # tokens for which a cache allocates memory: it copies less than 1 % more

# Larger results are stored, or shown, in part.
MOST_TRACED_CELLS = 2**19  # heads x queries x keys of a layer of which every step is stored
MOST_TRACED_TOKENS = 512  # tokens of which one head's steps are stored: 1 MB a matrix
MOST_RANKED_QUERIES = 512  # queries whose largest weights are stored, evenly spaced
MOST_ROLE_QUERIES = 512  # queries, evenly spaced, and as many whose word occurred before
LEAST_REPEAT_QUERIES = 8  # a mean over fewer depends too much on the text
MOST_LOGITS = 2**27  # logits of all positions, for the next words: 540 MB
SUMMARY_PAIRS = 2**24  # the repr of a larger matrix has no entropy, which would take too long
MOST_SHOWN_VALUES = 4096  # values of a tensor in the repr of a mask
