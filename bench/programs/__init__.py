"""Programs that move bytes for the benchmark, two processes each: `python -m bench.programs NAME ROLE WORD...`.

A program prints `hello key=value...` to stdout, then answers each request on stdin with one line: `ok key=value...` or
`error TEXT`. The first request is `meet`, with the words of the other process's hello. Each task has `clear` (reset the
buffers), `run`, and `verify` (compare the received bytes). The active process measures a run. Only programs that
measure kvpipe import it, because the others run in their own environments.
"""
