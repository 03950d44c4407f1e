"""`kvpipe doctor`: finds what is wrong with a deployment, by queries of its instances. It needs no vLLM.

`examine` queries, `find` draws conclusions from the answers, `report` shows both.
"""
