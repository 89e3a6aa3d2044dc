"""`python limited.py COMMAND...`: run it where no file may grow past 3 MB, as on a disk that is full.

The small model's weights (2 to 3 MB) can still be written, its optimiser's state cannot.
"""

import os
import resource
import sys

resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
os.execv(sys.argv[1], sys.argv[1:])
