"""Takes as long to import as a test needs to kill a client meanwhile."""

import time

time.sleep(1)
