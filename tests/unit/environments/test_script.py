"""What is said to a model, in tokens: what its chat template writes after a turn, and nothing that was sampled."""

import pytest

from bapo.environments.script import CUT, PolicyScript, tool_format
from bapo.models.policy import encoded
from bapo.types import Problem
from tests.environments import QWEN, SEARCH
from tests.environments import chatting as policy


def said(script, what):
    return script.policy.decode(script.observation(what))


def test_an_observation_is_what_the_template_writes_after_the_turn():
    script = PolicyScript(policy(), tools={"": [SEARCH]})
    found = [{"role": "tool", "name": "search", "content": text} for text in ("It is 4.", "Or 5.")]
    text = said(script, found)
    assert text.startswith("\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert text.index("It is 4.") < text.index("Or 5.")
    assert "0" not in text  # nothing of the fixed conversation
    assert said(script, "") == said(script, []) == ""


def test_the_prompt_tells_of_the_tools_and_ends_with_what_the_environment_said():
    script = PolicyScript(policy(), tools={"": [SEARCH]})
    prompt = script.policy.decode(script.prompt(Problem("p", "Find it.", None), " Now."))
    assert "search" in prompt
    assert prompt.endswith("Find it. Now.<|im_end|>\n<|im_start|>assistant\n")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find it."}]
    longer = script.policy.decode(script.prompt(Problem("p", chat, None), " Now."))
    assert longer.endswith("Find it. Now.<|im_end|>\n<|im_start|>assistant\n")
    instead = script.policy.decode(script.prompt(Problem("p", chat, None), [{"role": "user", "content": "Play."}]))
    assert "Find it" not in instead
    two = PolicyScript(policy(), tools={"a": [SEARCH], "b": []})
    for name, told in (("a", True), ("b", False)):
        row = Problem("p", "Find it.", None, extra={"environment": name})
        assert ("search" in two.policy.decode(two.prompt(row, ""))) is told
    with pytest.raises(ValueError, match="nothing to answer"):
        script.prompt(Problem("p", "", None), "")


def test_text_without_a_chat_is_continued_as_it_stands():
    script = PolicyScript(policy(None))
    assert script.policy.decode(script.prompt(Problem("p", "1+1", None), "=")) == "1+1="
    assert said(script, "2;") == "2;"
    assert said(script, [{"role": "user", "content": "3;"}]) == "3;"


def test_a_long_observation_is_cut_with_a_mark():
    script = PolicyScript(policy(None), observation_tokens=4)
    assert said(script, "abcd") == "abcd"
    assert script._cut("abcdefgh") == "abcd" + CUT.format(4)


def test_what_an_environment_sees_of_a_turn():
    script = PolicyScript(policy(), tools={"": [SEARCH]})
    assert script.shown("<think>\nno: up\n</think>\n\ndown<|im_end|>") == "\n\ndown"
    assert script.shown("<think>\nup") == ""
    assert script.shown("down") == "down"


def test_a_template_that_removes_earlier_reasoning_is_refused_where_it_does():
    PolicyScript(policy(), tools={"": [SEARCH]})  # before a tool's message, it keeps it
    with pytest.raises(ValueError, match="prefix-preserving: when a user message follows, it removes the reasoning"):
        PolicyScript(policy())
    PolicyScript(policy(template_options={"enable_thinking": False}))  # there is none to remove
    PolicyScript(policy(QWEN.replace("THINKS", "false")))
    shorter = QWEN.replace("THINKS", "false").replace("'\n' + said", "'\n' + (said if loop.last else said[:1])")
    with pytest.raises(ValueError, match="it changes the turn before"):
        PolicyScript(policy(shorter, template_options={"enable_thinking": False}))


def test_the_context_of_a_turn_as_its_template_writes_it():
    """Two turns with reasoning, of which the template keeps the last one's only, in the words of the template."""
    assert PolicyScript(policy(), tools={"": [SEARCH]}).context(Problem("p", "Go.", None), "", []) is None
    script = PolicyScript(policy(), forks=True)
    turns = [
        (encoded(script.policy.tokenizer, f"<think>\nhm\n</think>\n\n{move}<|im_end|>"), said)
        for move, said in (("left", "a wall"), ("up", [{"role": "user", "content": "free"}]))
    ]
    found = script.policy.decode(script.context(Problem("p", "Play.", None), " Go.", turns))
    written = [("user", "Play. Go."), ("assistant", "left"), ("user", "a wall"), ("assistant", "up"), ("user", "free")]
    assert found == "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in written) + (
        "<|im_start|>assistant\n"
    )
    calls = PolicyScript(policy(), tools={"": [SEARCH]}, forks=True)
    asked = calls.prompt(Problem("p", "Find.", None), "")
    turn = encoded(calls.policy.tokenizer, "<think>\nhm\n</think>\n\n<tool_call>{}</tool_call><|im_end|>")
    told = [{"role": "tool", "name": "search", "content": "x"}]
    as_it_stands = asked + turn + calls.observation(told)
    assert calls.context(Problem("p", "Find.", None), "", [(turn, told)]) == as_it_stands  # so no row is needed
    with pytest.raises(ValueError, match="this model has no chat"):
        PolicyScript(policy(None), forks=True)


def test_templates_that_cannot_hold_a_conversation_with_tools_are_refused():
    no_tools = QWEN.replace("{% if tools %}", "{% if false %}")
    no_role = QWEN.replace("m.role == 'tool'", "m.role == 'tool' and raise_exception('no tools here')")
    silent = QWEN.replace("'<|im_start|>user\n<tool_response>\n' + said + '\n</tool_response><|im_end|>\n'", "''")
    for template, why in (
        (None, "cannot be told of its tools"),
        (no_tools, "cannot be told of its tools"),
        (no_role, "refuses a tool message after a turn: no tools here"),
        (silent, "does not write tool messages"),
    ):
        with pytest.raises(ValueError, match=why):
            PolicyScript(policy(template and template.replace("THINKS", "true")), tools={"": [SEARCH]})


def test_the_format_of_calls_follows_from_the_template():
    script = PolicyScript(policy(), tools={"": [SEARCH]})
    assert tool_format(script.policy.tokenizer) == "hermes"
    assert script.calls_for("hermes") is script.calls_for("mine:parse") is None
    for chosen, why in (("", "does not recognise"), ("tokenizer", "has none"), ("xml", "'xml' is unknown")):
        with pytest.raises(ValueError, match=why):
            script.calls_for(chosen)


def test_a_tokenizer_with_a_template_of_its_own_finds_the_calls():
    script = PolicyScript(policy(), tools={"": [SEARCH]})
    script.policy.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    assert tool_format(script.policy.tokenizer) == "tokenizer"
    find = script.calls_for("tokenizer")
    turn = '<tool_call>{"name": "search", "arguments": {"text": "it"}}</tool_call><|im_end|>'
    assert find(turn) == [("search", {"text": "it"})]
    assert find("It is 4.<|im_end|>") == []
    assert "cannot be read" in find("<tool_call>{</tool_call><|im_end|>")
