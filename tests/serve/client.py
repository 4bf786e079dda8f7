"""Tests `unweight serve` with the official client of OpenAI's API: client.py URL CASE..."""

import json
import re
import sys
import threading
import urllib.error
import urllib.request
from typing import Literal, Optional

import openai
import pydantic

URL = sys.argv[1]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]


def served():
    return client.models.list().data[0].id


def complete(**fields):
    return client.completions.create(**{"model": served(), "prompt": "once", "max_tokens": 8, **GREEDY, **fields})


def chat(**fields):
    return client.chat.completions.create(
        **{"model": served(), "messages": HELLO, "max_completion_tokens": 8, **GREEDY, **fields}
    )


def get(path):
    with urllib.request.urlopen(URL.removesuffix("/v1") + path, timeout=60) as answer:
        return answer.read().decode()


def metric(name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", get("/metrics"), re.MULTILINE).group(1))


def refused(kind, call, **expected):
    """Checks that the call fails with this class of error and these attributes."""
    try:
        call()
    except kind as error:
        for name, value in expected.items():
            assert getattr(error, name) == value, (name, getattr(error, name), error.body)
        assert error.body["message"] and error.body["type"], error.body
        return error
    raise AssertionError(f"not refused: {expected}")


def streamed(pieces, of_chat):
    """Returns texts and finish reasons of a stream's choices by index, and its usage."""
    texts, reasons, usage = {}, {}, None
    for piece in pieces:
        if piece.usage is not None:
            usage = piece.usage
        for choice in piece.choices:
            assert choice.index not in reasons, "nothing follows the reason"
            text = (choice.delta.content if of_chat else choice.text) or ""
            texts[choice.index] = texts.get(choice.index, "") + text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def models():
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.owned_by == "unweight" and model.max_model_len == 4096
    assert client.models.retrieve("tiny").id == "tiny"
    refused(openai.NotFoundError, lambda: client.models.retrieve("other"))


def completions():
    answer = complete()
    (choice,) = answer.choices
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "tiny"
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert complete().choices[0].text == choice.text, "greedy texts are the same"
    assert complete(max_tokens=3).choices[0].finish_reason == "length"
    default = client.completions.create(model="tiny", prompt="once", seed=1)
    assert default.usage.completion_tokens <= 16


def prompts():
    ids = [0, *range(40, 46)]
    one, other = complete(prompt=ids).choices[0].text, complete(prompt="twice").choices[0].text
    both = complete(prompt=[ids, [0, 50]])
    assert both.choices[0].text == one and both.usage.prompt_tokens == len(ids) + 2
    both = complete(prompt=["once", "twice"])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [complete().choices[0].text, other]


def conversation():
    answer = chat()
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    # <s> <|user|> h e l l o <|assistant|>
    assert answer.usage.prompt_tokens == 8, answer.usage
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert chat(messages=parts).choices[0].message.content == choice.message.content
    longer = [{"role": "system", "content": "be brief"}, *HELLO, {"role": "assistant", "content": "x"}, *HELLO]
    assert chat(messages=longer).usage.prompt_tokens == 8 + 9 + 2 + 6
    # Without a limit, the context is the limit.
    free = client.chat.completions.create(model="tiny", messages=HELLO, seed=3, stop=["e", "a", "i", "o"])
    assert free.choices[0].finish_reason == "stop"
    # The template can raise an error.
    late = [*HELLO, {"role": "system", "content": "x"}]
    error = refused(openai.BadRequestError, lambda: chat(messages=late), param="messages")
    assert "a system message comes first" in str(error)


def streams_are_the_same():
    for fields in ({}, {"n": 2, "temperature": 1.2, "seed": 5, "max_tokens": 40}):
        whole = complete(**fields)
        texts, reasons, usage = streamed(complete(stream=True, **fields), False)
        assert usage is None
        assert texts == {choice.index: choice.text for choice in whole.choices}, (texts, whole)
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    whole = chat(temperature=1, seed=9, max_completion_tokens=60)
    pieces = list(chat(temperature=1, seed=9, max_completion_tokens=60, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[0].object == "chat.completion.chunk"
    assert len(pieces) > 5 and len({piece.id for piece in pieces}) == 1
    texts, reasons, _ = streamed(pieces, True)
    assert texts[0] == whole.choices[0].message.content and reasons[0] == whole.choices[0].finish_reason
    assert "\ufffd" not in texts[0][:-1] or "\ufffd" in whole.choices[0].message.content


def usage():
    answer = complete(prompt=[0, 5, 6], n=2, max_tokens=7, seed=1, temperature=0.5)
    assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens <= 14
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = complete(prompt=[0, 5, 6], n=2, max_tokens=7, seed=1, temperature=0.5, **fields)
    assert last.choices == [] and last.usage == answer.usage, last
    *_, last = chat(**fields)
    assert last.choices == [] and last.usage == chat().usage, last


def stop():
    fields = {"temperature": 1, "seed": 11, "max_tokens": 80}
    whole = complete(**fields).choices[0].text
    # A string of two characters from the middle, which byte tokens split.
    at = next(at for at in range(10, len(whole) - 1) if whole[at : at + 2].isascii())
    mark = whole[at : at + 2]
    expected = whole[: whole.index(mark)]
    answer = complete(stop=["never comes", mark], **fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop"), (answer, expected)
    texts, reasons, _ = streamed(complete(stop=mark, stream=True, **fields), False)
    assert (texts[0], reasons[0]) == (expected, "stop")
    assert answer.usage.completion_tokens < 80


def choices():
    fields = {"temperature": 1, "seed": 21, "max_tokens": 20}
    several = complete(n=4, **fields).choices
    assert [choice.index for choice in several] == [0, 1, 2, 3]
    assert len({choice.text for choice in several}) == 4, "each has random numbers of its own"
    for choice in several:
        alone = complete(**{**fields, "seed": 21 + choice.index}).choices[0]
        assert alone.text == choice.text, "the seeds are documented"


def seeds():
    fields = {"temperature": 1, "max_tokens": 20}
    assert complete(seed=-7, **fields).choices[0].text == complete(seed=-7, **fields).choices[0].text
    assert complete(**fields).choices[0].text != complete(**fields).choices[0].text, "without a seed: one of the system"
    likeliest = complete(max_tokens=3).choices[0].text
    for narrow in [{"top_k": 1}, {"min_p": 1.0}]:
        narrowed = {complete(seed=seed, temperature=1, max_tokens=3, extra_body=narrow).choices[0].text for seed in range(4)}
        assert narrowed == {likeliest}, "of one candidate the likeliest is chosen"


def tokens_of(text, **fields):
    return post("/tokenize", {"prompt": text, "add_special_tokens": False, **fields})["tokens"]


def post(path, body):
    request = urllib.request.Request(URL.removesuffix("/v1") + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def sampled(answer):
    """Returns the tokens of a completion from its log probabilities."""
    return answer.choices[0].logprobs.tokens


def biases():
    wanted, second = tokens_of("qr")
    assert complete(logit_bias={str(wanted): 100, str(second): 90}).choices[0].text == "q" * 8
    assert complete(logit_bias={str(wanted): -100, str(second): 90}).choices[0].text == "r" * 8
    # A bias of 0 changes nothing, and neither does a concurrent request with another bias.
    assert complete(logit_bias={str(wanted): 0}).choices[0].text == complete().choices[0].text
    fields = {"temperature": 1, "seed": 4, "max_tokens": 20}
    alone = complete(**fields).choices[0].text
    wrong = []

    def one(bias):
        text = complete(logit_bias={str(wanted): bias} if bias else None, **fields).choices[0].text
        if text != ("q" * 20 if bias else alone):
            wrong.append((bias, text))

    threads = [threading.Thread(target=one, args=(bias,)) for bias in [0, 100, 0, 100, 0, 100]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def penalties():
    (wanted,) = tokens_of("q")
    # With a penalty, the token loses its lead of 100 eventually, but not at once.
    often = {"logit_bias": {str(wanted): 20}, "logprobs": 0, "max_tokens": 40}
    assert sampled(complete(**often)) == ["q"] * 40
    frequent = sampled(complete(frequency_penalty=2, **often))
    assert 5 <= frequent.count("q") < 30 and frequent[:5] == ["q"] * 5, frequent
    assert sampled(complete(presence_penalty=2, **often)).count("q") >= frequent.count("q")
    repeated = sampled(complete(extra_body={"repetition_penalty": 100}, **often))
    assert repeated[0] == "q" and repeated[1] != "q", "the token of the step before counts"
    once = sampled(complete(prompt="q", extra_body={"repetition_penalty": 100}, **often))
    assert once[0] != "q", "tokens of the prompt count"
    negative = sampled(complete(frequency_penalty=-2, logprobs=0, max_tokens=30))
    assert len(set(negative[10:])) <= 1, negative


def ends():
    fields = {"logprobs": 0, "max_tokens": 30, "temperature": 1, "seed": 11, "logit_bias": {"1": -100}}
    plain = complete(**fields)
    tokens, text = sampled(plain), plain.choices[0].text
    # A token of one character that is not in the text before.
    at = next(at for at in range(2, 27) if re.fullmatch("[a-zA-Z]", tokens[at]) and tokens[at] not in tokens[:at])
    letter = tokens[at]
    (last,) = tokens_of(letter)
    stopped = complete(extra_body={"stop_token_ids": [last]}, **fields)
    assert stopped.choices[0].finish_reason == "stop" and stopped.usage.completion_tokens == at + 1
    assert sampled(stopped) == tokens[: at + 1] and letter not in stopped.choices[0].text
    late = sampled(complete(extra_body={"stop_token_ids": [last], "min_tokens": at + 3}, **fields))
    assert len(late) >= at + 3 and letter not in late[: at + 3] and late[:at] == tokens[:at], late
    # A stop string does not end a text before the minimum, either.
    assert complete(stop=letter, **fields).choices[0].text == text.split(letter)[0]
    assert complete(stop=letter, extra_body={"min_tokens": 30}, **fields).choices[0].text == text
    # Every text ends at once, unless its end token is ignored.
    ending = {"logit_bias": {"1": 100}, "max_tokens": 6}
    at_once = complete(**ending)
    assert (at_once.choices[0].finish_reason, at_once.usage.completion_tokens) == ("stop", 1), at_once
    ignoring = complete(extra_body={"ignore_eos": True}, **ending)
    assert (ignoring.choices[0].finish_reason, ignoring.usage.completion_tokens) == ("length", 6), ignoring
    assert complete(extra_body={"min_tokens": 3}, **ending).usage.completion_tokens == 4


def logprobs():
    answer = complete(logprobs=5)
    own = answer.choices[0].logprobs
    assert len(own.tokens) == len(own.token_logprobs) == len(own.top_logprobs) == answer.usage.completion_tokens
    for at, (token, value, top) in enumerate(zip(own.tokens, own.token_logprobs, own.top_logprobs)):
        assert value <= 0 and max(top.values()) == value == top[token], "greedy takes the likeliest"
        assert own.text_offset[at] == sum(len(token) for token in own.tokens[:at])
    hot = complete(logprobs=2, temperature=1, seed=3, max_tokens=20, n=2)
    pieces = list(complete(logprobs=2, temperature=1, seed=3, max_tokens=20, n=2, stream=True))
    for choice in hot.choices:
        parts = [own for piece in pieces for own in piece.choices if own.index == choice.index and own.logprobs]
        streamed = [value for part in parts for value in part.logprobs.token_logprobs]
        assert streamed == choice.logprobs.token_logprobs
        assert all(len(top) in (1, 2, 3) for top in choice.logprobs.top_logprobs)
    # Adjustments change the choice, not the log probabilities.
    (wanted,) = tokens_of("q")
    forced = complete(logit_bias={str(wanted): 100}, logprobs=5, max_tokens=1).choices[0].logprobs
    assert forced.tokens == ["q"] and forced.top_logprobs[0].items() >= own.top_logprobs[0].items()
    answer = chat(logprobs=True, top_logprobs=20)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 20 and token.top_logprobs[0].logprob == token.logprob
        assert sum(2.718281828**other.logprob for other in token.top_logprobs) <= 1.0001
    shown = b"".join(bytes(token.bytes) for token in content if not re.fullmatch("<.+>", token.token))
    assert shown.decode(errors="replace").startswith(answer.choices[0].message.content.split("\ufffd")[0])
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    parts = [part.choices[0] for part in chat(logprobs=True, top_logprobs=20, stream=True)]
    streamed = [token for part in parts if part.logprobs for token in part.logprobs.content]
    assert streamed == content


def echoes():
    plain = complete(n=2, temperature=1, seed=2)
    echoed = complete(n=2, temperature=1, seed=2, echo=True)
    assert [choice.text for choice in echoed.choices] == ["once" + choice.text for choice in plain.choices]
    ids = tokens_of("twice")
    both = complete(prompt=[ids, tokens_of("once")], echo=True)
    assert both.choices[0].text.startswith("twice") and both.choices[1].text.startswith("once")
    texts, _, _ = streamed(complete(n=2, temperature=1, seed=2, echo=True, stream=True), False)
    assert [texts[0], texts[1]] == [choice.text for choice in echoed.choices]
    assert echoed.usage == plain.usage


def tokenize():
    answer = post("/tokenize", {"prompt": "hello", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == 6 and answer["max_model_len"] == 4096, answer
    assert answer["token_strs"][1:] == list("hello")
    assert tokens_of("hello") == answer["tokens"][1:]
    assert post("/detokenize", {"tokens": answer["tokens"][1:]}) == {"prompt": "hello"}
    assert post("/detokenize", {"tokens": answer["tokens"]})["prompt"].endswith("hello")
    conversation = post("/tokenize", {"messages": HELLO, "model": "tiny"})
    assert conversation["count"] == chat().usage.prompt_tokens == 8 and conversation["token_strs"] is None
    for path, body in [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "x", "model": "other"}),
        ("/detokenize", {"tokens": [264]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [0] * 5000}),
    ]:
        try:
            post(path, body)
            raise AssertionError(f"{path} takes {str(body)[:80]}")
        except urllib.error.HTTPError as error:
            assert error.code in (400, 404) and json.loads(error.read())["error"]["message"]


def errors():
    bad = openai.BadRequestError
    refused(openai.NotFoundError, lambda: complete(model="other"), code="model_not_found", param="model")
    refused(bad, lambda: complete(suffix="x"), param="suffix", code="unsupported_parameter")
    refused(bad, lambda: complete(echo=True, logprobs=1), param="echo", code="unsupported_parameter")
    for name, value in [
        ("logprobs", 6),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("logit_bias", {"50": 101}),
        ("logit_bias", {"264": 1}),
        ("logit_bias", {"fifty": 1}),
        ("logit_bias", {str(token): 1 for token in range(100_000)}),
    ]:
        refused(bad, lambda: complete(**{name: value}), param=name)
    for name, value in [("stop_token_ids", [264]), ("repetition_penalty", 0), ("min_tokens", 9), ("ignore_eos", 1)]:
        refused(bad, lambda: complete(extra_body={name: value}), param=name)
    refused(bad, lambda: chat(functions=[{"name": "f"}]), param="functions", code="unsupported_parameter")
    refused(bad, lambda: chat(top_logprobs=3), param="top_logprobs")
    refused(bad, lambda: complete(n=9), param="n")
    refused(bad, lambda: complete(temperature=-1), param="temperature")
    refused(bad, lambda: complete(prompt=[0, 264]), param="prompt")
    refused(bad, lambda: complete(prompt=[[]]), param="prompt")
    refused(bad, lambda: complete(max_tokens=4096), code="context_length_exceeded")
    refused(bad, lambda: chat(messages=[{"role": "user", "content": "x" * 5000}]), code="context_length_exceeded")
    refused(bad, lambda: complete(stream=True, max_tokens=4096), code="context_length_exceeded")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    refused(bad, lambda: chat(messages=image), param="messages[0]")
    # Fields that OpenAI's API ignores are ignored.
    complete(user="me", extra_body={"unheard_of": 1})


class Part(pydantic.BaseModel):
    kind: Literal["nut", "pin"]
    sizes: list[Literal[1, 20]] = pydantic.Field(max_length=2)


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=3)
    paid: bool
    part: Part
    note: Optional[Literal["soon"]]


# JSON without optional white space; the ids are those of tokenizer.json.
WHITE = {str(token): -100 for token in [199, 200, 203, 222]}
WARM = {"temperature": 1, "max_completion_tokens": 160, "logit_bias": WHITE}


def structured():
    for seed in range(4):
        answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Order, seed=seed, **WARM)
        (choice,) = answer.choices
        assert isinstance(choice.message.parsed, Order) and choice.finish_reason == "stop", choice
        assert json.loads(choice.message.content).keys() == {"name", "paid", "part", "note"}
    schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": Order.model_json_schema()}}
    whole = chat(response_format=schema, seed=3, n=3, **WARM)
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts, reasons, _ = streamed(chat(response_format=schema, seed=3, n=3, stream=True, **WARM), True)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert set(reasons.values()) == {"stop"}, (texts, reasons)
    for text in texts.values():
        Order.model_validate_json(text)
    greedy = chat(response_format=schema, max_completion_tokens=60, logprobs=True, top_logprobs=2)
    assert len(greedy.choices[0].logprobs.content) == greedy.usage.completion_tokens
    # The end token is only allowed when the grammar is complete; the token limit always applies.
    brackets = {str(token): 50 for token in tokens_of("{}")}
    ending = {"response_format": {"type": "json_object"}, "logit_bias": {"1": 100, **brackets}}
    for more in ({}, {"extra_body": {"ignore_eos": True}}, {"temperature": 1, "seed": 1}):
        answer = chat(**ending, **more)
        assert json.loads(answer.choices[0].message.content) == {} and answer.choices[0].finish_reason == "stop", answer
    assert chat(response_format=schema, max_completion_tokens=3).choices[0].finish_reason == "length"
    assert chat(response_format={"type": "text"}).choices[0].message.content == chat().choices[0].message.content
    for grammar, pattern in [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "<" word+ ">"\nword: /[xy]{2}/'}, "<([xy]{2})+>"),
        ({"json": {"enum": [1, "a"]}}, r'\s*(1|"a")\s*'),
    ]:
        for fields in ({}, {"temperature": 1, "seed": 2}):
            answer = complete(max_tokens=60, extra_body={"structured_outputs": grammar}, **fields).choices[0]
            assert re.fullmatch(pattern, answer.text) or answer.finish_reason == "length", (grammar, answer)
    older = complete(max_tokens=20, extra_body={"guided_choice": ["red", "green"]})
    assert older.choices[0].text in ("red", "green")
    impossible = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    for wrong in [impossible, {"type": "object", "$ref": "http://example.com/a"}, {"pattern": "(", "type": "string"}]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
        refused(openai.BadRequestError, lambda: chat(response_format=form), param="response_format", code="grammar_invalid")
    minimum = {"min_tokens": 3, "structured_outputs": {"regex": "a"}}
    refused(openai.BadRequestError, lambda: complete(extra_body=minimum), param="min_tokens")


def structured_neighbours():
    fields = {"temperature": 1, "max_tokens": 30}
    alone = [complete(seed=seed, **fields).choices[0].text for seed in range(4)]
    pattern = {"structured_outputs": {"regex": "[a-c]{30}"}}
    held = complete(seed=9, extra_body=pattern, **fields).choices[0].text
    wrong = []

    def one(seed):
        text = complete(seed=seed if seed < 4 else 9, extra_body=pattern if seed >= 4 else None, **fields).choices[0].text
        if text != (alone[seed] if seed < 4 else held):
            wrong.append((seed, text))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in [0, 4, 1, 5, 2, 6, 3, 7]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and re.fullmatch("[a-c]{30}", held), wrong


RAIN = {
    "type": "function",
    "function": {
        "name": "rain",
        "parameters": {"properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}}},
    },
}
RAIN["function"]["parameters"] |= {"required": ["city"], "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now"}}


def check_call(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "rain" and arguments["city"] in ("Oslo", "Rome"), call
        assert arguments.get("days", 0) <= 9 and arguments.keys() <= {"city", "days"}, call


def streamed_calls(pieces):
    calls, reason, text = {}, None, ""
    for piece in pieces:
        for choice in piece.choices:
            reason, text = choice.finish_reason or reason, text + (choice.delta.content or "")
            for call in choice.delta.tool_calls or []:
                own = calls.setdefault(call.index, {"name": "", "arguments": ""})
                own["name"] += call.function.name or ""
                own["arguments"] += call.function.arguments or ""
    return [(calls[at]["name"], calls[at]["arguments"]) for at in sorted(calls)], reason, text


def tools():
    both = {"tools": [RAIN, NOW], **WARM}
    names = set()
    for seed in range(3):
        (choice,) = chat(tool_choice="required", parallel_tool_calls=False, seed=seed, **both).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
        (call,) = choice.message.tool_calls
        check_call(call)
        names.add(call.function.name)
    assert names <= {"now", "rain"}
    named = {"type": "function", "function": {"name": "rain"}}
    (choice,) = chat(tool_choice=named, seed=2, **both).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "stop" and call.function.name == "rain", choice
    calls, reason, text = streamed_calls(chat(tool_choice=named, seed=2, stream=True, **both))
    assert (calls, reason, text) == ([("rain", call.function.arguments)], "stop", ""), calls
    # The model chooses between a call and an answer.
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
    for first, called in [("<", True), ("{", False)]:
        bias = {**WHITE, str(tokens_of(first)[0]): 30}
        fields = {**both, "logit_bias": bias, "seed": 4, "parallel_tool_calls": False}
        (choice,) = chat(response_format=schema, **fields).choices
        assert bool(choice.message.tool_calls) == called, choice
        assert choice.finish_reason == ("tool_calls" if called else "stop"), choice
        assert called or json.loads(choice.message.content) == {"a": 1}, choice
    plain = chat(tools=[RAIN]).choices[0].message
    assert plain.tool_calls is None and plain.content is not None
    assert chat(tools=[RAIN], tool_choice="none").choices[0].message.content == chat().choices[0].message.content
    # The template prints definitions, calls and results.
    function = {"name": "rain", "arguments": '{"city": "Oslo", "days": 2}'}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    shown = "rain;<tool_call>"
    call = '<tool_call>{"name": "rain", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
    expected = 1 + len(shown) + 1 + len("hello") + 1 + len(call) + len("<|tool|>rain") + 1
    assert chat(messages=turns, tools=[RAIN]).usage.prompt_tokens == expected
    assert post("/tokenize", {"messages": turns, "tools": [RAIN]})["count"] == expected
    bad = openai.BadRequestError
    for fields in [
        {"tools": "x"},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [NOW, NOW]},
        {"tools": [NOW] * 200},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
    ]:
        refused(bad, lambda: chat(**fields), param="tools")
    for choice in ["required", named]:
        refused(bad, lambda: chat(tool_choice=choice), param="tool_choice")
    refused(bad, lambda: chat(tools=[RAIN], tool_choice="always"), param="tool_choice")
    refused(bad, lambda: complete(extra_body={"tools": [NOW]}), param="tools")
    pattern = {"structured_outputs": {"regex": "a"}}
    refused(bad, lambda: chat(tools=[NOW], extra_body=pattern), param="structured_outputs")


def eight_clients():
    alone = {seed: complete(seed=seed, temperature=1, max_tokens=12, n=2).choices for seed in range(8)}
    wrong = []

    def one(seed):
        try:
            again = complete(seed=seed, temperature=1, max_tokens=12, n=2, stream=seed % 2 == 1)
            if seed % 2 == 1:
                texts, _, _ = streamed(again, False)
            else:
                texts = {choice.index: choice.text for choice in again.choices}
            if texts != {choice.index: choice.text for choice in alone[seed]}:
                wrong.append((seed, texts))
        except Exception as error:
            wrong.append((seed, error))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def a_client_that_goes_away():
    before = metric("unweight_cancelled_total")
    stream = complete(max_tokens=4000, stream=True)
    next(iter(stream))
    assert metric("unweight_kv_pages_free") < metric("unweight_kv_pages")
    stream.close()
    # The same for a client that waits for a whole answer.
    impatient = client.with_options(timeout=0.5)
    try:
        impatient.completions.create(model="tiny", prompt="x", max_tokens=4000, temperature=0)
        raise AssertionError("4000 tokens in half a second?")
    except openai.APITimeoutError:
        pass
    for _ in range(1500):
        if metric("unweight_sequences_running") == 0 and metric("unweight_sequences_waiting") == 0:
            break
        threading.Event().wait(0.02)
    assert metric("unweight_cancelled_total") == before + 2
    assert metric("unweight_kv_pages_free") == metric("unweight_kv_pages")


def health_and_metrics():
    assert json.loads(get("/health")) == {"status": "ok"}
    steps, first = metric("unweight_step_seconds_count"), metric("unweight_time_to_first_token_seconds_count")
    tokens, prompt = metric("unweight_generated_tokens_total"), metric("unweight_prompt_tokens_total")
    made = complete(n=2, temperature=1, seed=6, max_tokens=5).usage
    assert metric("unweight_time_to_first_token_seconds_count") == first + 2
    assert metric("unweight_generated_tokens_total") == tokens + made.completion_tokens
    assert metric("unweight_prompt_tokens_total") == prompt + 2 * made.prompt_tokens
    assert metric("unweight_step_seconds_count") >= steps + 5
    assert metric('unweight_requests_total{route="/v1/completions",status="200"}') > 10
    assert metric('unweight_requests_total{route="/v1/completions",status="400"}') > 5
    assert metric('unweight_kv_cache_info{kv_cache="bf16"}') == 1
    assert metric("unweight_preempted_total") == metric("unweight_kv_units") == metric("unweight_kv_units_free") == 0
    text = get("/metrics")
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{[^}]*\})? [0-9.e+-]+', line), line
    assert metric('unweight_step_seconds_bucket{le="+Inf"}') == metric("unweight_step_seconds_count")


def keys():
    refused(openai.AuthenticationError, lambda: client.models.list(), code="invalid_api_key")
    for key in ["sesam", "sesamex", "sesamf"]:
        other = openai.OpenAI(base_url=URL, api_key=key, max_retries=0)
        refused(openai.AuthenticationError, lambda: other.models.list())
    opened = openai.OpenAI(base_url=URL, api_key="sesame", max_retries=0)
    assert len(opened.models.list().data) == 1


def queue_full():
    error = refused(openai.RateLimitError, complete, code="queue_full")
    assert error.response.headers["retry-after"] == "1"
    error = refused(openai.BadRequestError, lambda: complete(n=3))
    assert "split the request" in str(error), "what never fits is not to be tried again"


CASES = {"chat": conversation}
for case in sys.argv[2:]:
    (CASES.get(case) or globals()[case])()
    print(f"{case}: ok")
