"""The first token of an answer, which one engine samples and another one goes on from."""
