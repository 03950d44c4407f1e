"""`kvpipe bench scale`: what an operation costs beside many peers and many handoffs under way."""
