"""Tests of kvpipe: the name of each test is a promise."""
