"""What the official client of OpenAI's API says to `unweight serve`: client.py URL CASE..."""

import json
import re
import sys
import threading
import urllib.request

import openai

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
    """The call is refused with that class of error and those of its attributes."""
    try:
        call()
    except kind as error:
        for name, value in expected.items():
            assert getattr(error, name) == value, (name, getattr(error, name), error.body)
        assert error.body["message"] and error.body["type"], error.body
        return error
    raise AssertionError(f"not refused: {expected}")


def streamed(pieces, of_chat):
    """Texts and reasons of the choices of a stream, by number; and its usage."""
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
    # Without a limit the context is one.
    free = client.chat.completions.create(model="tiny", messages=HELLO, seed=3, stop=["e", "a", "i", "o"])
    assert free.choices[0].finish_reason == "stop"
    # The template has its say.
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
    # A string of two characters from the middle, which tokens of one byte cut.
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


def errors():
    bad = openai.BadRequestError
    refused(openai.NotFoundError, lambda: complete(model="other"), code="model_not_found", param="model")
    for name, value in [
        ("logprobs", 1),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"50": 100}),
        ("echo", True),
        ("suffix", "x"),
    ]:
        refused(bad, lambda: complete(**{name: value}), param=name, code="unsupported_parameter")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    refused(bad, lambda: chat(tools=[tool]), param="tools", code="unsupported_parameter")
    refused(bad, lambda: chat(response_format={"type": "json_object"}), param="response_format")
    refused(bad, lambda: chat(logprobs=True), param="logprobs")
    refused(bad, lambda: complete(n=9), param="n")
    refused(bad, lambda: complete(temperature=-1), param="temperature")
    refused(bad, lambda: complete(prompt=[0, 264]), param="prompt")
    refused(bad, lambda: complete(prompt=[[]]), param="prompt")
    refused(bad, lambda: complete(max_tokens=4096), code="context_length_exceeded")
    refused(bad, lambda: chat(messages=[{"role": "user", "content": "x" * 5000}]), code="context_length_exceeded")
    refused(bad, lambda: complete(stream=True, max_tokens=4096), code="context_length_exceeded")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    refused(bad, lambda: chat(messages=image), param="messages[0]")
    # What OpenAI's ignores is ignored.
    complete(user="me", extra_body={"unheard_of": 1})


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
    # So does one that waits for a whole answer.
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
    assert "split it" in str(error), "what never fits is not to be tried again"


CASES = {"chat": conversation}
for case in sys.argv[2:]:
    (CASES.get(case) or globals()[case])()
    print(f"{case}: ok")
