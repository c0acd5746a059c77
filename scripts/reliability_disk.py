"""Runs commands on a disk of 4 MiB, in a separate namespace, as root there.

reliability_faults.py runs it in `unshare --map-root-user --mount`, with the mount
point, a folder for the resulting runs, and the commands as JSON.
"""

import json
import pathlib
import shutil
import subprocess
import sys


def main(disk: pathlib.Path, out: pathlib.Path, commands: list[list[str]]) -> None:
    """Prints each command's status and stderr, as JSON; copies the runs to `out`.

    The first command has a disk to itself; the others share one, without the file that
    filled it.
    """
    ends = []
    for i, command in enumerate(commands):
        if i < 2:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True
            )
        (disk / "ballast").unlink(missing_ok=True)
        done = subprocess.run(command, capture_output=True, text=True)
        ends.append({"status": done.returncode, "stderr": done.stderr})
        shutil.copytree(disk / "run", out / str(i))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), json.loads(sys.argv[3]))
