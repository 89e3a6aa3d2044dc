"""Runs untrusted programs: a warm fork server, and around each program what keeps it in.

    client.py       the verifier's side: the server, and the sandboxes it opens
    run.py          the verifier's side: one program, watched until it ends or has to be ended
    clock.py        the time of one check: what counts, and when it ends in any case
    server.py       the fork server: one process, forks a sandbox's first process for each check
    inside.py       a sandbox's first process: forks the programs, one after the other
    namespaces.py   the walls: what a program sees of the machine
    filter.py       the system calls that the kernel refuses
    limits.py       how much of it it may use
    syscalls.py     the system calls that Python has no function for
    watch.py        what a sandbox uses, seen from outside
    level.py        which walls this machine can build

What runs inside (`server`, `inside`, `namespaces`, `filter`, `limits`, `syscalls`) imports the standard library alone.
"""
