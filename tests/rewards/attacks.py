"""Hostile programs. The task is `answer(n) == 2 * n + 2`.

Each of `REACH` tries for something outside, and solves the task only if it got it: a score of 0 says that it did not.
Each of `FORGE` tries to pass without solving the task, each of `EXHAUST` to use up the machine. `{name}` is a canary of
the test.
"""

from __future__ import annotations

import textwrap

_REACH = """
reached = False
try:
{body}
except BaseException:
    pass
def answer(n):
    return 2 * n + 2 if reached else 0
"""


def reach(body: str) -> str:
    """A program that gives right answers only if `body` sets `reached`."""
    return _REACH.replace("{body}", textwrap.indent(textwrap.dedent(body).strip(), "    "))


REACH = {
    "read /etc/passwd": "reached = bool(open('/etc/passwd').read())",
    "read the host's files": "reached = bool(open('{canary}').read())",
    "list the host's files": "import os\nreached = bool(os.listdir('{folder}'))",
    "read through a symbolic link": "import os\nos.symlink('{canary}', 'link')\nreached = bool(open('link').read())",
    "read through dots": "reached = bool(open('../../../../../../../../{canary}').read())",
    "read this repository": "reached = bool(open('{tests}').read())",
    "see the environment": "import os\nreached = 'FLEUVE_SECRET' in os.environ or 'PATH' in os.environ",
    "see its environment in /proc": "reached = bool(open('/proc/self/environ').read())",
    "see other processes": "import os\nreached = any(name.isdigit() for name in os.listdir('/proc'))",
    "write through /proc": "open('/proc/sys/kernel/hostname', 'w').write('x')\nreached = True",
    "delete the host's file": "import os\nos.remove('{canary}')\nreached = True",
    "delete everything": "import shutil\nshutil.rmtree('{folder}')\nreached = True",
    "delete Python": "import os, json\nos.remove(json.__file__)\nreached = True",
    "overwrite Python": "import json\nopen(json.__file__, 'a').write('#')\nreached = True",
    "write to the host's folder": "open('{folder}/new', 'w').write('x')\nreached = True",
    "write to the root": "open('/new', 'w').write('x')\nreached = True",
    "write into a library folder": "import sys\nopen(sys.prefix + '/lib/new.py', 'w').write('x')\nreached = True",
    "connect to a local port": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nreached = True",
    "send a datagram": """
        import socket
        socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))
        reached = True
    """,
    "resolve a name": "import socket\nsocket.getaddrinfo('example.org', 80)\nreached = True",
    "connect to an abstract socket": """
        import socket
        socket.socket(socket.AF_UNIX).connect('\\0{abstract}')
        reached = True
    """,
    "connect to a socket in a folder": """
        import socket
        socket.socket(socket.AF_UNIX).connect('{folder}/socket')
        reached = True
    """,
    "see a network device": """
        import socket
        reached = any(name != 'lo' for _, name in socket.if_nameindex())
    """,
    "kill a process of the host": "import os\nos.kill({pid}, 9)\nreached = True",
    "kill its parent": """
        import os, time
        os.kill(os.getppid(), 9)
        time.sleep(0.2)
        reached = os.getppid() != 1
    """,
    "interrupt its parent": """
        import os, signal, time
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGSEGV, signal.SIGQUIT):
            try:
                os.kill(1, name)
            except OSError:
                pass
    """,
    "kill all it may": "import os\nos.kill(-1, 9)\nreached = True",
    "become root": "import os\nos.setresuid(0, 0, 0)\nos.setgroups([0])\nreached = True",
    "new user namespace": """
        import ctypes
        reached = ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == 0
    """,
    "mount": """
        import ctypes
        reached = ctypes.CDLL(None).mount(b'proc', b'/tmp', b'proc', 0, None) == 0
    """,
    "unmount its scratch folder": "import ctypes\nreached = ctypes.CDLL(None).umount2(b'/tmp', 2) == 0",
    "change the root": "import os\nos.mkdir('r')\nos.chroot('r')\nreached = True",
    "make a device": "import os, stat\nos.mknod('sda', 0o600 | stat.S_IFBLK, os.makedev(8, 0))\nreached = True",
    "read a disk": "reached = bool(open('/dev/sda', 'rb').read(1) or open('/dev/vda', 'rb').read(1))",
    "trace its parent": "import ctypes\nreached = ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
    "raise its limits": """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        reached = True
    """,
    "run a shell": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)\nreached = True",
    "run Python": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''], check=True)\nreached = True",
    "leave memory behind": """
        import ctypes
        reached = ctypes.CDLL(None).shmget(42, 4096, 0o1600) >= 0
    """,
    "rename the host": "import socket\nsocket.sethostname('x')\nreached = True",
    "set the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nreached = True",
    "take priority": "import os\nos.setpriority(os.PRIO_PROCESS, 0, -20)\nreached = True",
    "descriptors that were left open": """
        import os
        for fd in range(4, 1024):
            try:
                os.fstat(fd)
                reached = True
            except OSError:
                pass
    """,
}

KERNEL = {
    "reach the host of a virtual machine": """
        import socket
        socket.socket(socket.AF_VSOCK)
        reached = True
    """,
    "talk to the kernel's own sockets": """
        import socket
        for family in (socket.AF_NETLINK, socket.AF_ALG, socket.AF_PACKET):
            try:
                socket.socket(family, socket.SOCK_RAW)
                reached = True
            except OSError:
                pass
    """,
    "io_uring, userfaultfd, bpf, keyctl, perf_event_open": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for number in (425, 323, 321, 250, 298) if os.uname().machine == 'x86_64' else (425, 282, 280, 219, 241):
            if libc.syscall(number, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1:
                reached = True
    """,
    "a namespace by clone": """
        import ctypes, os, signal
        number = {'x86_64': 56}.get(os.uname().machine, 220)
        pid = ctypes.CDLL(None).syscall(number, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        reached = pid > 0
    """,
    "a namespace by clone3": """
        import ctypes, os, struct
        arguments = struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)
        pid = ctypes.CDLL(None).syscall(435, arguments, len(arguments))
        if pid == 0:
            os._exit(0)
        reached = pid > 0
    """,
    "lower its own priority, policy, share of the cores": """
        import os
        idle = os.sched_param(0)
        for attempt in (
            lambda: os.nice(1),
            lambda: os.setpriority(os.PRIO_PROCESS, 0, 19),
            lambda: os.sched_setscheduler(0, os.SCHED_IDLE, idle),
            lambda: os.sched_setscheduler(0, os.SCHED_BATCH, idle),
            lambda: os.sched_setparam(0, idle),
            lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        ):
            try:
                attempt()
                reached = True
            except OSError:
                pass
    """,
    "lower its parent's limits and priority": """
        import os, resource
        parent = os.getppid()
        for attempt in (
            *(lambda which=which: resource.prlimit(parent, which, (0, 0)) for which in range(resource.RLIMIT_RTPRIO)),
            lambda: resource.prlimit(parent, resource.RLIMIT_CPU),
            lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
            lambda: os.sched_setscheduler(parent, os.SCHED_IDLE, os.sched_param(0)),
            lambda: os.sched_setaffinity(parent, {min(os.sched_getaffinity(0))}),
        ):
            try:
                attempt()
                reached = True
            except (OSError, ValueError):
                pass
    """,
    "let nobody wait for its children": """
        import ctypes, signal
        for handler in (signal.SIG_IGN, signal.SIG_DFL, lambda *a: None):
            try:
                signal.signal(signal.SIGCHLD, handler)
                reached = True
            except OSError:
                pass
        without_waiting = (ctypes.c_long * 32)(0, 2)  # SA_NOCLDWAIT, wherever the structure has its flags
        without_waiting[17] = 2
        if ctypes.CDLL(None).sigaction(signal.SIGCHLD, without_waiting, None) == 0:
            reached = True
    """,
    "the calls of another architecture": """
        import ctypes
        reached = ctypes.CDLL(None).syscall(0x40000000 + 39) > 0
    """,
}
"""As `REACH`, for what the filter of system calls is there for."""

FORGE = {
    "exit(0)": "exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "exit in a call": "import sys\ndef answer(n): sys.exit(0)",
    "os._exit in a call": "import os\ndef answer(n): os._exit(0)",
    "exit in finally": "import sys\ndef answer(n):\n  try: raise ValueError\n  finally: sys.exit(0)",
    "raises what ends tests": "def answer(n): raise GeneratorExit",
    "raises AssertionError": "def answer(n): raise AssertionError",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef answer(n): return 0",
    "equals everything": """
        class Equal:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 0
        def answer(n): return Equal()
    """,
    "an int that equals everything": """
        class Equal(int):
            __hash__ = int.__hash__
            def __eq__(self, other): return True
        def answer(n): return Equal()
    """,
    "a type that lies about its class": """
        class Equal:
            __class__ = int
            def __eq__(self, other): return True
        def answer(n): return Equal()
    """,
    "every operator": """
        class Any:
            def __getattr__(self, name): return Any()
            def __call__(self, *args): return Any()
            def __eq__(self, other): return True
            def __bool__(self): return True
        answer = Any()
    """,
    "patched builtins": """
        import builtins
        builtins.AssertionError = type('Quiet', (BaseException,), {})
        builtins.__build_class__ = builtins.exec = builtins.eval = builtins.compile = lambda *a, **k: None
        builtins.isinstance = lambda *a: True
        def answer(n): return 0
    """,
    "patched print and open": """
        import builtins, io
        builtins.print = lambda *a, **k: None
        builtins.open = io.open = lambda *a, **k: io.StringIO('1')
        def answer(n): return 0
    """,
    "patched unittest": """
        import unittest
        unittest.TestCase.assertEqual = lambda *a: None
        def answer(n): return 0
    """,
    "patched examiner": """
        import sys
        examiner = sys.modules['fleuve.rewards.code.examiner']
        examiner._passes = lambda *a: True
        examiner.Remote.__eq__ = lambda *a: True
        def answer(n): return 0
    """,
    "patched answers": """
        import sys
        candidate = sys.modules['fleuve.rewards.code.candidate']
        candidate.Answers.__call__ = lambda self, question: {"value": True, "arguments": []}
        def answer(n): return 0
    """,
    "patched json": """
        import json
        json.loads = lambda *a, **k: {"value": True}
        json.dumps = lambda *a, **k: '{"value": true, "arguments": []}'
        def answer(n): return 0
    """,
    "talks to the examiner itself": """
        import json, os
        def send(message):
            body = json.dumps(message).encode()
            os.write(3, len(body).to_bytes(4, 'big') + body)
        for number in range(100):
            send({"value": {"ref": 0}, "arguments": []})
            send({"value": True, "arguments": [True]})
        def answer(n): return 0
    """,
    "speaks nonsense to the examiner": "import os\nos.write(3, b'\\xff' * 65536)\ndef answer(n): return 0",
    "sends a bomb to the examiner": """
        import os
        body = b'{"value": {"range": [0, 1000000000000]}, "arguments": [{"set": [[]]}]}'
        os.write(3, len(body).to_bytes(4, 'big') + body)
        def answer(n): return range(10 ** 12)
    """,
    "writes the verdicts": """
        import os
        for fd in range(0, 64):
            try: os.write(fd, b'11111111')
            except OSError: pass
        def answer(n): return 0
    """,
    "prints what a runner might": """
        print('1 passed', 'OK', 'PASSED', 'true', '1', sep='\\n', flush=True)
        def answer(n): return 0
    """,
    "looks through all objects for what is expected": """
        import gc
        def answer(n):
            for thing in gc.get_objects():
                if isinstance(thing, str) and 'assert answer(' in thing:
                    return int(thing.rpartition('==')[2])
            return 0
    """,
    "looks through frames for what is expected": """
        import sys
        def answer(n):
            frame = sys._getframe()
            while frame:
                for text in map(repr, [*frame.f_locals.values(), *frame.f_globals.values()]):
                    if 'assert answer(' in text:
                        return int(text.rpartition('==')[2].strip(' \\'"]'))
                frame = frame.f_back
            return 0
    """,
    "looks through its memory for what is expected": """
        import ctypes, gc
        def answer(n):
            for thing in gc.get_objects():
                if isinstance(thing, (bytes, bytearray)) and b'42' in thing:
                    return 42
            return 0
    """,
    "traces": """
        import sys
        sys.settrace(lambda frame, event, arg: frame.f_locals.update(value=42) or None)
        def answer(n): return 0
    """,
    "prints later": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.05), print('1 passed'))).start()
        def answer(n): return 0
    """,
    "shadows what tests use": """
        class bool(int): pass
        def abs(x): return 0
        def check(candidate): pass
        __builtins__ = {}
        def answer(n): return 0
    """,
    "on deletion": """
        import os
        class Last:
            def __del__(self): os._exit(0)
        last = Last()
        def answer(n): return 0
    """,
    "closes everything": "import os\nos.closerange(0, 1000)\ndef answer(n): return 0",
    "is no program": "def answer(n:",
    "a null byte": "def answer(n): return '\\0'\n\0",
}

EXHAUST = {
    "infinite loop": "while True: pass",
    "infinite loop that catches all": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "sleep": "import time\ntime.sleep(3600)",
    "sleep in a call": "import time\ndef answer(n): time.sleep(3600)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "ignores signals": """
        import signal, time
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        time.sleep(3600)
    """,
    "one endless C call": "9 ** 9 ** 9",
    "regular expression": "import re\nre.match('(a|a)*b', 'a' * 40)",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "a chain of short lives": """
        import os, time
        for _ in range(2):
            if os.fork() == 0:
                while True:
                    until = time.perf_counter() + 0.004
                    while time.perf_counter() < until: pass
                    if os.fork() != 0: os._exit(0)
        time.sleep(3600)
    """,
    "threads": """
        import threading, time
        for _ in range(1000): threading.Thread(target=time.sleep, args=(3600,)).start()
    """,
    "memory": "x = []\nwhile True: x.append(bytearray(2 ** 22))",
    "memory at once": "x = bytearray(2 ** 40)",
    "memory in children": """
        import os, time
        for _ in range(4): os.fork()
        x = bytearray(48 * 2 ** 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(3600)
    """,
    "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "crash": "import ctypes\nctypes.string_at(0)",
    "output": "while True: print('x' * 10000)",
    "error output": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "output in a call": "def answer(n):\n  while True: print('x' * 10000)",
    "huge file": "with open('x', 'wb') as f:\n  while True: f.write(b'x' * 65536)",
    "many files": "n = 0\nwhile True:\n  open(str(n), 'w').close()\n  n += 1",
    "many folders": "import os\nwhile True:\n  os.mkdir('d')\n  os.chdir('d')",
    "many descriptors": "x = [open('/dev/zero') for _ in range(10000)]",
    "daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 100)
                time.sleep(3600)
            os._exit(0)
    """,
    "a child that keeps the connection": """
        import os, time
        if os.fork() == 0: time.sleep(3600)
        os._exit(0)
    """,
    "an endless answer": "import itertools\ndef answer(n): return itertools.count()",
    "a huge answer": "def answer(n): return [0] * 10 ** 7",
    "a huge number": "def answer(n): return 1 << 10 ** 8",
    "a deep answer": "def answer(n):\n  x = []\n  for _ in range(100000): x = [x]\n  return x",
    "an answer that holds itself": "def answer(n):\n  x = []\n  x.append(x)\n  return x",
    "a deep program": "def answer(n): return " + "(" * 5000 + "0" + ")" * 5000,
    "a long expression": "def answer(n): return " + "-" * 200000 + "0",
}
