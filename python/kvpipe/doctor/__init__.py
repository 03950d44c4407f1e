"""`kvpipe doctor`: asks the instances of a deployment what is wrong with it. It needs no vLLM.

`examine` asks, `find` draws conclusions from the answers, `report` shows both.
"""
