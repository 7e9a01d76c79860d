"""The command `pipemesh` as `python -m pipemesh`."""

import sys

from pipemesh.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
