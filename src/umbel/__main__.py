"""Lets ``python -m umbel`` do what the `umbel` command does."""

import sys

from umbel.cli import main

sys.exit(main())
