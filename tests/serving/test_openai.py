"""The OpenAI-compatible server, asked by OpenAI's own client; answers are those of the runtime."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types.completion_choice import Logprobs

from dflash_trt.runtime.generate import Generation, GenerationOptions
from tests.serving.conftest import Served

QUESTION = "Why is the sky blue?"
MESSAGES = [{"role": "user", "content": QUESTION}]


def chat(served: Served, **values: object):
    values = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24} | values
    return served.client().chat.completions.create(**values)


def expected(served: Served, **options: object) -> Generation:
    return served.runtime.generate(QUESTION, GenerationOptions(**{"max_tokens": 24} | options))


def test_chat_is_the_runtimes_answer(served: Served) -> None:
    answer, wanted = chat(served), expected(served)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == "length"
    counts = {"prompt_tokens": wanted.metrics.prompt_tokens, "completion_tokens": 24}
    counts["total_tokens"] = sum(counts.values())
    assert answer.usage.model_dump(include=counts) == counts
    figures = answer.choices[0].dflash
    assert figures["drafting"] == "on"
    assert figures["acceptance_length"] == round(wanted.metrics.acceptance_length, 3)


def test_drafting_can_be_switched_off_and_says_so(served: Served) -> None:
    answer = chat(served, extra_body={"draft": False})
    assert answer.choices[0].message.content == expected(served).text
    assert answer.choices[0].dflash["drafting"] == "off: not asked for"


def test_drafting_as_far_as_it_pays(served: Served) -> None:
    """Random weights accept nothing, so each shorter block that is tried wastes less, whatever is
    found to be fastest; the answer is the same."""
    values = {"max_tokens": 100, "extra_body": {"adaptive": True, "ignore_eos": True}}
    answer = chat(served, **values).choices[0]
    wanted = expected(served, max_tokens=100, ignore_eos=True)
    assert answer.message.content == wanted.text
    assert answer.dflash["drafts_wasted"] < wanted.metrics.drafts_wasted


def test_stream_is_the_same_answer(served: Served) -> None:
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in choices) == expected(served).text
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    assert choices[-1].dflash["drafting"] == "on"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1
    raw = served.post("/v1/completions", prompt="x", max_tokens=3, stream=True).text
    assert raw.endswith("}\n\ndata: [DONE]\n\n")
    assert raw.count("[DONE]") == 1


def test_usage_is_streamed_on_request_only(served: Served) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in chat(served, stream=True))


def test_seed_and_sampling_parameters_reach_the_runtime(served: Served) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 7}
    more = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2}
    answer = chat(served, **sampling, logit_bias={"65": 3}, extra_body=more)
    wanted = expected(served, **sampling, **more, logit_bias={65: 3.0})
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].dflash["seed"] == 7


def test_a_vanishing_temperature_is_greedy(served: Served) -> None:
    """Logits divided by it would overflow and fail every client's request."""
    answer = chat(served, temperature=1e-300)
    assert answer.choices[0].message.content == expected(served).text


def test_choices_have_seeds_of_their_own(served: Served) -> None:
    answer = chat(served, n=3, temperature=1, seed=11)
    texts = [expected(served, temperature=1.0, seed=11 + i).text for i in range(3)]
    assert [choice.message.content for choice in answer.choices] == texts
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == 72
    streamed = ["", "", ""]
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = chat(served, n=3, temperature=1, seed=11, stream=True, **usage)
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert last.usage == answer.usage


def test_ends_that_are_asked_for(served: Served) -> None:
    assert chat(served, max_completion_tokens=5).usage.completion_tokens == 5
    wanted = expected(served)
    token = wanted.tokens[6]
    answer = chat(served, extra_body={"stop_token_ids": [token]})
    assert answer.usage.completion_tokens == wanted.tokens.index(token)
    assert answer.choices[0].finish_reason == "stop"


def test_stop(served: Served) -> None:
    whole = expected(served).text
    stop = whole[10:12]
    answer = chat(served, stop=[stop, "never"])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(chat(served, stop=stop, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[: whole.index(stop)]


def test_chat_logprobs(served: Served) -> None:
    content = chat(served, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    wanted = expected(served, logprobs=3).logprobs
    assert [entry.logprob for entry in content] == pytest.approx([e.logprob for e in wanted])
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)  # greedy
    text = served.runtime.codec.text
    assert [entry.token for entry in content] == [text([e.token]) for e in wanted]
    assert [[t.token for t in entry.top_logprobs] for entry in content] == [
        [text([token]) for token, _ in e.top] for e in wanted
    ]
    chunks = chat(served, logprobs=True, stream=True)
    entries = [e for c in chunks if (lp := c.choices[0].logprobs) for e in lp.content]
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in wanted])
    assert [e.token for e in entries] == [text([e.token]) for e in wanted]


def test_logprobs_of_drawn_tokens(served: Served) -> None:
    """Of the tokens that were drawn, seldom the most likely ones, and without penalties or heat."""
    drawn = {"temperature": 0.7, "seed": 3, "presence_penalty": 1.0}
    content = chat(served, **drawn, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    wanted = expected(served, **drawn, logprobs=2).logprobs
    assert [e.token for e in content] == [served.runtime.codec.text([e.token]) for e in wanted]
    assert [e.logprob for e in content] == pytest.approx([e.logprob for e in wanted])
    assert any(e.logprob < e.top_logprobs[0].logprob for e in content)


def test_completions_take_text_and_tokens(served: Served) -> None:
    create = served.client().completions.create
    ids = served.runtime.codec.ids("Once upon")
    wanted = served.runtime.generate(ids, GenerationOptions(16, logprobs=2))
    for prompt in ("Once upon", ids):
        answer = create(model="tiny", prompt=prompt, temperature=0)
        assert answer.choices[0].text == wanted.text
    many = create(model="tiny", prompt=["Once upon", "A"], temperature=0, n=2)
    assert [c.text == wanted.text for c in many.choices] == [True, True, False, False]
    assert many.usage.prompt_tokens == len(ids) + 1
    for choice in create(model="tiny", prompt=ids, temperature=0, logprobs=2, n=2).choices:
        check_logprobs(served, choice.logprobs, wanted)
    text = "".join(
        c.choices[0].text for c in create(model="tiny", prompt=ids, temperature=0, stream=True)
    )
    assert text == wanted.text


def check_logprobs(served: Served, found: Logprobs, wanted: Generation) -> None:
    """Of a choice of a plain completion; each token begins where the texts of all before it end."""
    text = served.runtime.codec.text
    tokens = [text([token]) for token in wanted.tokens]
    assert found.token_logprobs == pytest.approx([e.logprob for e in wanted.logprobs])
    assert found.tokens == tokens
    assert found.text_offset == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for top, entry in zip(found.top_logprobs, wanted.logprobs, strict=True):
        assert top == pytest.approx({text([token]): value for token, value in entry.top})


def test_messages_in_parts_and_with_roles(served: Served) -> None:
    parts = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "the sky blue?"}]
    answer = chat(served, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == expected(served).text
    developer = [{"role": "developer", "content": "Be brief."}, *MESSAGES]
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    both = [chat(served, messages=m).choices[0].message.content for m in (developer, system)]
    assert both[0] == both[1] != answer.choices[0].message.content


def test_sixteen_at_once_get_their_own_answers(served: Served) -> None:
    questions = [f"Question {i}: what is {i} times {i}?" for i in range(16)]
    alone = [served.runtime.generate(q, GenerationOptions(20)).text for q in questions]

    def ask(question: str) -> str:
        stream = chat(
            served, messages=[{"role": "user", "content": question}], max_tokens=20, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, questions)) == alone


def test_models(served: Served) -> None:
    assert [model.id for model in served.client().models.list()] == ["tiny"]
    assert served.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("gpt-4")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": True}, "top_p"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 513}, "max_tokens: 513 is above this server's 512"),
        ({"n": 17}, "n: "),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "the engine holds 512"),
        ({"stop": ""}, "stop"),
        ({"extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logit_bias": {"288": 1}}, "token 288 is outside the vocabulary"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"min_tokens": 99}}, "min-tokens 99"),
        ({"reasoning_effort": "low"}, "chat format takes none"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "takes no tools"),
    ],
)
def test_bad_input_is_refused_by_name(served: Served, values: dict, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(served, **values)
    assert refused.value.type == "invalid_request_error"
    assert message in refused.value.message
    with pytest.raises(openai.BadRequestError):
        chat(served, **values, stream=True)


def test_another_models_name_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        chat(served, model="gpt-4")
