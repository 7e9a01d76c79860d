"""`python -m pipemesh` is the command `pipemesh`."""

import sys

from pipemesh.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
