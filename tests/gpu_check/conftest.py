"""The programs of the check lie in `scripts`."""

import sys

from tests.peers import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
