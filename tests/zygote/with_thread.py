"""Has a thread from its import on, as a module with a reactor would."""

import threading

threading.Thread(target=threading.Event().wait, name="reactor", daemon=True).start()
