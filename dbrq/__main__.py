"""``python -m dbrq`` is the command ``dbrq``."""

import sys

from .command_line import main

if __name__ == "__main__":
    sys.exit(main())
