"""One answer out of the replies of several workers, in any order of losses."""

import random

import orjson
import pytest

from kvpipe.queue.assembly import Assembly
from kvpipe.queue.chunks import chunk_of
from kvpipe.queue.messages import Reply

TOKENS = tuple(range(100, 112))


def chunk(text, *, index=0, finish=None, head="first", **fields):
    choice = {"index": index, "text": text, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": head, "created": 1, "model": "m", "choices": [choice], **fields}) + b"\n\n"


def text_of(token):
    """Some tokens have no text of their own, as the first bytes of a character."""
    return "" if token % 5 == 0 else f"<{token}>"


def assembly(*, has_one_sequence=True):
    return Assembly("request", has_one_sequence=lambda: has_one_sequence)


class Worker:
    """Replies of one delivery: one event for each group of tokens, after those that the front end says it has."""

    def __init__(self, name, tokens=TOKENS, groups=1, head="first"):
        self.name = name
        self._tokens = tokens
        self._groups = groups
        self._head = head

    def reply(self, kind, number=0, **fields):
        return Reply(kind, "request", self.name, f"queue of {self.name}", number, **fields)

    def replies(self, *, in_parts=False):
        """All of them; each piece in two parts before an empty rest if `in_parts`."""
        parts = [self.reply("head", 0, is_stream=True)]
        for start in range(0, len(self._tokens), self._groups):
            tokens = self._tokens[start : start + self._groups]
            is_last = start + self._groups >= len(self._tokens)
            body = chunk("".join(map(text_of, tokens)), finish="stop" if is_last else None, head=self._head)
            if in_parts:
                parts.append(self.reply("part", len(parts), body=body[:9], tokens=tokens[:1]))
                parts.append(self.reply("part", len(parts), body=body[9:]))
                body, tokens = b"", tokens[1:]
            parts.append(self.reply("piece", len(parts), body=body, tokens=tokens))
        parts.append(self.reply("piece", len(parts), body=b"data: [DONE]\n\n"))
        return [*parts, self.reply("end", len(parts))]


def shown(parts):
    """Text, ids and end of what a client got."""
    body = b"".join(part.body for part in parts if part.kind == "piece")
    chunks = [found for event in body.split(b"\n\n") if (found := chunk_of(event)) is not None]
    texts = "".join(choice["text"] for found in chunks for choice in found["choices"])
    return texts, {found["id"] for found in chunks}, body.endswith(b"data: [DONE]\n\n"), [part.kind for part in parts]


def given(it, replies):
    """Outcomes of replies, until the answer has ended: the front end then knows the request no more."""
    outcomes = []
    for reply in replies:
        outcomes.append(it.receive(reply))
        if (part := outcomes[-1].part) is not None and part.is_last:
            break
    return outcomes


def parts_of(outcomes):
    return [outcome.part for outcome in outcomes if outcome.part is not None]


def controls_of(outcomes):
    return [outcome.control.kind for outcome in outcomes if outcome.control is not None]


def test_an_answer_of_one_worker_is_passed_on_as_it_is():
    worker = Worker("a")
    outcomes = given(assembly(), worker.replies())
    assert parts_of(outcomes) == worker.replies()
    assert controls_of(outcomes) == ["done"]


@pytest.mark.parametrize("num_seen", range(1, len(TOKENS) + 2))
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_another_worker_goes_on_where_the_first_was_lost(num_seen, groups):
    it = assembly()
    first = given(it, Worker("a").replies()[:num_seen])
    second = Worker("b", groups=groups, head="second")
    [begun] = given(it, [second.reply("begin")])
    assert begun.control.kind == "continue"
    assert begun.control.tokens == TOKENS[: num_seen - 1]
    outcomes = given(it, second.replies())
    text, ids, has_ended, kinds = shown(parts_of([*first, *outcomes]))
    assert text == "".join(map(text_of, TOKENS))
    assert ids <= {"first"} if num_seen > 1 else ids == {"second"}
    assert has_ended
    assert (kinds.count("head"), kinds.count("end")) == (1, 1)
    assert controls_of(outcomes) == ["done"]


def test_what_the_lost_worker_still_sends_is_left_out():
    it = assembly()
    first, second = Worker("a").replies(), Worker("b")
    before = given(it, first[:3])
    given(it, [second.reply("begin")])
    assert given(it, first[3:]) == [type(before[0])()] * len(first[3:])
    text = shown(parts_of([*before, *given(it, second.replies())]))[0]
    assert text == "".join(map(text_of, TOKENS))


def test_a_delivery_that_another_one_has_overtaken_ends_when_it_is_complete():
    it = assembly()
    first, second = Worker("a").replies(), Worker("b")
    given(it, first[:3])
    given(it, [second.reply("begin")])
    assert controls_of(given(it, first[-1:])) == [], "the second one may have been lost meanwhile"
    given(it, second.replies()[:1])
    assert controls_of(given(it, first[3:])) == ["drop"]
    assert controls_of(given(it, second.replies()[1:])) == ["done"]


def test_a_piece_that_comes_in_parts_is_one_piece():
    outcomes = given(assembly(), Worker("a", groups=3).replies(in_parts=True))
    assert [part.body for part in parts_of(outcomes)] == [reply.body for reply in Worker("a", groups=3).replies()]
    assert [part.tokens for part in parts_of(outcomes)] == [reply.tokens for reply in Worker("a", groups=3).replies()]


def test_an_answer_that_comes_in_parts_is_one_answer():
    worker = Worker("a")
    parts = [worker.reply("part", number, body=b"x") for number in range(3)]
    outcomes = given(assembly(), [*parts, worker.reply("head", 3, body=b"y", status=201)])
    assert [(part.kind, part.status, part.body) for part in parts_of(outcomes)] == [("head", 201, b"xxxy")]
    assert controls_of(outcomes) == ["done"]


def test_parts_that_are_more_than_the_front_ends_memory_fail_the_request(monkeypatch):
    monkeypatch.setattr("kvpipe.queue.assembly.MAX_REPLY_BYTES", 2)
    outcomes = given(assembly(), [Worker("a").reply("part", number, body=b"x") for number in range(4)])
    assert [part.kind for part in parts_of(outcomes)][:1] == ["failed"]
    assert "more than 2 bytes" in parts_of(outcomes)[0].reason
    assert controls_of(outcomes)[0] == "drop"


@pytest.mark.parametrize("lost", range(len(Worker("a").replies())))
def test_a_reply_that_is_missing_has_another_worker_go_on(lost):
    it = assembly()
    first = Worker("a").replies()
    outcomes = given(it, first[:lost] + first[lost + 1 :])
    is_last = lost == len(first) - 1
    assert controls_of(outcomes)[:1] == ([] if is_last else ["requeue"])
    second = Worker("b")
    outcomes += given(it, [second.reply("begin"), *second.replies()])
    text, _, has_ended, kinds = shown(parts_of(outcomes))
    assert text == "".join(map(text_of, TOKENS))
    assert has_ended
    assert kinds.count("end") == 1


def test_a_worker_that_samples_other_tokens_than_the_client_has_fails_the_request():
    it = assembly()
    given(it, Worker("a").replies()[:4])
    other = Worker("b", tokens=(*TOKENS[:2], 7, 8, 9))
    outcomes = given(it, [other.reply("begin"), *other.replies()])
    failed = parts_of(outcomes)
    assert [part.kind for part in failed[:1]] == ["failed"]
    assert "other tokens" in failed[0].reason
    assert "drop" in controls_of(outcomes)


def test_an_answer_with_several_sequences_is_not_continued():
    it = assembly(has_one_sequence=False)
    worker = Worker("a")
    given(it, [worker.replies()[0], worker.reply("piece", 1, body=chunk("x"), tokens=(1,))])
    [outcome] = given(it, [Worker("b").reply("begin")])
    assert outcome.part is not None
    assert "several sequences" in outcome.part.reason


def test_an_error_in_the_middle_of_a_stream_fails_it():
    it = assembly()
    given(it, Worker("a").replies()[:3])
    other = Worker("b")
    outcomes = given(it, [other.reply("begin"), other.reply("head", 0, status=400, body=b"no")])
    assert "answered 400" in parts_of(outcomes)[0].reason


def test_a_complete_answer_after_a_lost_worker_is_the_clients():
    it = assembly()
    other = Worker("b")
    whole = other.reply("head", 0, status=200, body=b"{}")
    outcomes = given(it, [other.reply("begin"), whole])
    assert parts_of(outcomes) == [whole]
    assert controls_of(outcomes) == ["continue", "done"]


def test_whatever_is_lost_a_client_gets_one_answer():
    for seed in range(2000):
        choice = random.Random(seed)
        it, outcomes = assembly(), []
        for number in range(choice.randint(1, 6)):
            worker = Worker(f"worker {number}", groups=choice.choice([1, 1, 2, 3]) if number else 1, head=str(number))
            in_parts = choice.random() < 0.5
            replies = ([worker.reply("begin")] if number else []) + worker.replies(in_parts=in_parts)
            if choice.random() < 0.3:
                del replies[choice.randrange(int(number > 0), len(replies))]
            outcomes += given(it, replies[: choice.randint(0, len(replies))])
            if any(part.kind == "end" for part in parts_of(outcomes)):
                break
        else:
            last = Worker("last", groups=choice.choice([1, 4]))
            outcomes += given(it, [last.reply("begin"), *last.replies()])
        text, ids, has_ended, kinds = shown(parts_of(outcomes))
        assert text == "".join(map(text_of, TOKENS)), seed
        assert len(ids) == 1
        assert has_ended
        assert b"".join(part.body for part in parts_of(outcomes)).count(b"[DONE]") == 1
        assert (kinds.count("head"), kinds.count("end"), kinds.count("failed")) == (1, 1, 0)


def chat(delta, **fields):
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": "x", "created": 1, "model": "m", "choices": [choice], **fields}) + b"\n\n"


def test_the_role_of_a_chat_is_sent_once():
    it = assembly()
    first, second = Worker("a"), Worker("b")
    role, said = chat({"role": "assistant", "content": ""}), chat({"content": "yes"})
    before = given(it, [first.reply("head", 0, is_stream=True), first.reply("piece", 1, body=role)])
    after = given(
        it,
        [
            second.reply("begin"),
            second.reply("head", 0, is_stream=True),
            second.reply("piece", 1, body=role),
            second.reply("piece", 2, body=said, tokens=(5,)),
        ],
    )
    assert [part.body for part in parts_of([*before, *after])] == [b"", role, said]


def test_a_stream_without_token_ids_is_not_continued():
    it = assembly()
    worker = Worker("a")
    given(it, [worker.reply("head", 0, is_stream=True), worker.reply("piece", 1, body=chunk("text"))])
    [outcome] = given(it, [Worker("b").reply("begin")])
    assert "no token ids" in outcome.part.reason


def test_a_chunk_of_reasoning_that_has_to_be_cut_fails_the_request():
    it = assembly()
    first, second = Worker("a"), Worker("b")
    given(
        it,
        [
            first.reply("head", 0, is_stream=True),
            first.reply("piece", 1, body=chat({"reasoning_content": "hm"}), tokens=(5,)),
        ],
    )
    merged = second.reply("piece", 1, body=chat({"reasoning_content": "hm, well"}), tokens=(5, 6))
    outcomes = given(it, [second.reply("begin"), second.reply("head", 0, is_stream=True), merged])
    assert "cannot be cut" in parts_of(outcomes)[0].reason


@pytest.mark.parametrize("num_seen", range(len(Worker("a").replies())))
def test_whatever_comes_twice_counts_once(num_seen):
    replies = Worker("a").replies()
    it = assembly()
    outcomes = given(it, [*replies[:num_seen], *replies[:num_seen], *replies[num_seen:]])
    assert parts_of(outcomes) == replies


def test_a_begin_that_is_asked_twice_is_answered_twice():
    it, worker = assembly(), Worker("b")
    given(it, Worker("a").replies()[:3])
    first, second = given(it, [worker.reply("begin"), worker.reply("begin")])
    assert first == second
    assert shown(parts_of(given(it, worker.replies())))[0] == "".join(map(text_of, TOKENS[2:]))


def test_an_answer_whose_end_mark_the_client_has_is_complete():
    it = assembly()
    given(it, Worker("a").replies()[:-1])
    [outcome] = given(it, [Worker("b").reply("begin")])
    assert (outcome.control.kind, outcome.part.kind) == ("done", "end")


def test_a_finish_and_a_usage_come_once():
    it = assembly()
    first, second = Worker("a", tokens=TOKENS[:2]), Worker("b", tokens=TOKENS[:2])
    finish = chunk("", finish="stop")
    usage = b'data: {"id":"x","choices":[],"usage":{"completion_tokens":2}}\n\n'

    def replies(worker):
        pieces = [(chunk(text_of(token)), (token,)) for token in TOKENS[:2]] + [(finish, ()), (usage, ())]
        return [worker.reply("head", 0, is_stream=True)] + [
            worker.reply("piece", number, body=body, tokens=tokens) for number, (body, tokens) in enumerate(pieces, 1)
        ]

    before = given(it, replies(first))
    after = given(it, [second.reply("begin"), *replies(second)])
    body = b"".join(part.body for part in parts_of([*before, *after]))
    assert (body.count(b'"stop"'), body.count(b"usage")) == (1, 1)


@pytest.mark.parametrize(
    "spoiled", [b'data: {"error":{"message":"no"}}\n\n', b"data: [DONE]\n\n", chunk("text without ids")]
)
def test_another_instance_that_does_not_come_as_far_as_the_client_is_fails_the_request(spoiled):
    it, other = assembly(), Worker("b")
    given(it, Worker("a").replies()[:4])
    outcomes = given(it, [other.reply("begin"), *other.replies()[:2], other.reply("piece", 2, body=spoiled)])
    assert parts_of(outcomes)[0].kind == "failed"


def test_another_instance_that_ends_before_what_the_client_has_fails_the_request():
    it, other = assembly(), Worker("b")
    given(it, Worker("a").replies()[:4])
    outcomes = given(it, [other.reply("begin"), *other.replies()[:2], other.reply("end", 2)])
    assert "ended before" in parts_of(outcomes)[0].reason


def test_a_chunk_with_ids_or_log_probabilities_of_each_token_is_not_cut():
    it, first, second = assembly(), Worker("a"), Worker("b", groups=2)
    body = chunk("<101>").replace(b'"text"', b'"token_ids":[101],"text"')
    given(it, [first.replies()[0], first.reply("piece", 1, body=body, tokens=(101,))])
    both = chunk("<101><102>").replace(b'"text"', b'"token_ids":[101,102],"text"')
    merged = second.reply("piece", 1, body=both, tokens=(101, 102))
    outcomes = given(it, [second.reply("begin"), second.replies()[0], merged])
    assert "cannot be cut" in parts_of(outcomes)[0].reason


def test_a_failure_ends_the_request_although_a_piece_before_it_was_lost():
    it, worker = assembly(), Worker("a")
    given(it, [worker.replies()[0], worker.replies()[3]])
    [outcome] = given(it, [worker.reply("failed", status=502, reason="no")])
    assert (outcome.control.kind, outcome.part.reason) == ("done", "no")


def test_a_chunk_whose_text_differs_from_what_the_client_has_is_not_cut():
    it, first, second = assembly(), Worker("a"), Worker("b")
    given(it, [first.replies()[0], first.reply("piece", 1, body=chunk("<101>"), tokens=(101,))])
    merged = second.reply("piece", 1, body=chunk("<other><102>"), tokens=(101, 102))
    outcomes = given(it, [second.reply("begin"), second.replies()[0], merged])
    assert "cannot be cut" in parts_of(outcomes)[0].reason


def test_the_control_port_of_each_instance_that_begins_is_reported_and_none_of_one_that_has_lost_the_request():
    it = assembly()
    first, second = Worker("a"), Worker("b")
    head = first.reply("head", is_stream=True, decode_control="d1:7200")
    assert it.receive(head).decode_control == "d1:7200"
    given(it, [first.replies()[1], second.reply("begin")])
    assert it.receive(head).decode_control == ""
    again = it.receive(second.reply("head", is_stream=True, decode_control="d2:7200"))
    assert (again.decode_control, again.part) == ("d2:7200", None)


def test_a_whole_answer_has_the_control_port_of_its_instance():
    [outcome] = given(assembly(), [Worker("a").reply("head", body=b"{}", decode_control="d1:7200")])
    assert (outcome.decode_control, outcome.part.body) == ("d1:7200", b"{}")
