"""Programs that move bytes for the benchmark, two processes each: `python -m kvpipe.bench.programs NAME ROLE WORD...`.

A program says `hello key=value...` on stdout, then answers each request of its stdin with one line: `ok key=value...`
or `error TEXT`. Requests are `meet` with the words of the other process's hello, then for a task `clear` (forget what
arrived), `run`, and `verify` (it did arrive). The active one takes the time of a run. This package imports nothing of
kvpipe, but for the programs that measure it: the others run in environments of their own.
"""
