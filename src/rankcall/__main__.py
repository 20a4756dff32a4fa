"""``python -m rankcall``."""

import sys

from rankcall.cli import main

if __name__ == "__main__":
    sys.exit(main())
