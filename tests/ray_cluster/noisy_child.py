"""A child that writes `bytes` to its log, says so, and waits for its end."""

import json
import sys
import time

from fleuve.launch.child import adopt

adopt()
options = json.loads(sys.argv[1])
sys.stdout.write("x" * options["bytes"])
sys.stdout.write("\nwritten\n")
sys.stdout.flush()
if options.get("exit") is not None:
    sys.exit(options["exit"])
time.sleep(600)
