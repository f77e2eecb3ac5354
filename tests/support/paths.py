"""Where the files of the repository are that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
TINY = str(SUPPORT / "tiny.gin")
