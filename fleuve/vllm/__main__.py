"""A vLLM server as a process of Fleuve's: `python -m fleuve.vllm '{"model": ..., "python": ...}'`.

It becomes that server: the socket, the token and the lifeline that its parent gave it are the server's. Without an
argument it prints what a server that is started by hand needs in its PYTHONPATH.
"""

from __future__ import annotations

import sys

import msgspec

from fleuve.config.vllm_environment import environment_problem
from fleuve.ending import leave_after
from fleuve.errors import UserError
from fleuve.vllm import INSIDE
from fleuve.vllm.options import VllmOptions, become


def main() -> None:
    if len(sys.argv) == 1:
        print(INSIDE)
        return
    leave_after(_become)


def _become() -> None:
    if len(sys.argv) != 2:
        raise UserError(
            'give the server\'s options as one JSON argument, such as \'{"model": "PATH", "python": "PATH"}\''
        )
    try:
        options = msgspec.json.decode(sys.argv[1], type=VllmOptions)
    except msgspec.DecodeError as error:
        raise UserError(f"vLLM options: {error}") from error
    if problem := environment_problem(options.python):
        raise UserError(problem)
    become(options)


if __name__ == "__main__":
    main()
