"""The suite is the same however it is started: a shell starts what runs in its background with Ctrl-C ignored, and
every process that the tests start would inherit that."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
