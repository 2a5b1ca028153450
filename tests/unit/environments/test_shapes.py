"""Environments of other libraries' shapes, and the calls in a turn."""

import asyncio
from types import SimpleNamespace

import pytest

from bapo.environments.calls import FORMATS, Malformed, format_of, own
from bapo.environments.shapes import Game, Tools, is_game
from tests.unit.environments import people


def call(name, **arguments):
    return [(name, arguments)]


def test_a_class_as_trl_wants_it_gives_tools_a_text_for_the_prompt_and_a_reward():
    tools = Tools(people.Guess(), [people.shout], FORMATS["hermes"])
    assert not is_game(tools.environment)
    assert list(tools.tools) == ["shout", "guess"]
    assert tools.begin({"below": 5, "prompt": "?"}, seed=1) == {"text": " It is below 5."}
    assert tools.environment.row == {"below": 5, "prompt": "?"}  # no more than the row has
    tools.environment.number = 4
    right = '<tool_call>{"name": "guess", "arguments": {"number": 4}}</tool_call>'
    said = tools.act(f"I say four.\n{right}{right.replace('4', '11')}")
    assert said["text"] == [
        {"role": "tool", "name": "guess", "content": "right"},
        {"role": "tool", "name": "guess", "content": "{'error': 'Too large.'}"},
    ]
    assert not said["over"]
    assert tools.act("It is four.") == {"text": [], "over": True}
    assert tools.grade() == {"reward": 1.0}


@pytest.mark.parametrize("name", ["reset", "get_reward", "_hidden", "__init__", "__class__", "nothing"])
def test_what_is_no_tool_is_not_found(name):
    tools = Tools(people.Guess(), [], FORMATS["hermes"])
    (said,) = tools.act("", call(name))["text"]
    assert said["content"] == str({"error": f"Tool {name} not found."})


def test_functions_alone_are_tools_also_async_ones_and_the_episode_has_no_reward_of_its_own():
    tools = Tools(None, [people.shout, people.later, people.__dunder__], FORMATS["hermes"])
    assert tools.begin({}, seed=1) == {}
    calls = [*call("shout", text="a"), *call("later", text="b"), *call("__dunder__", text="c"), *call("shout", word=1)]
    said = [each["content"] for each in tools.act("", calls)["text"]]
    assert said[:3] == ["A", "b", "c"]
    assert "unexpected keyword argument" in said[3]
    assert tools.grade() == {}


def test_reward_functions_see_the_environment_the_messages_and_the_columns():
    tools = Tools(people.Unrewarded(), [], FORMATS["hermes"], [(people.looks, 2.0)])
    tools.begin({"below": 5}, seed=1)
    tools.environment.number = 3
    tools.act("", call("guess", number=3))
    assert tools.grade() == {"reward": 2.0 * (1 + 5)}
    none = Tools(None, [], list, [(lambda completions: [None], 1.0)])
    with pytest.raises(ValueError, match="no reward function applies"):
        none.grade()


def test_a_malformed_call_is_told_to_the_model_and_nothing_of_its_turn_is_called():
    tools = Tools(people.Guess(), [], FORMATS["hermes"])
    tools.begin({}, seed=1)
    for turn, why in (
        ('<tool_call>{"name": "guess", "arguments": {"number": 1}', "no </tool_call>"),
        ("<tool_call>{guess}</tool_call>", "not valid JSON"),
        ('<tool_call>["guess"]</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": 1}</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name": "guess", "arguments": [1]}</tool_call>', '"arguments" of the tool call must be'),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ):
        said = tools.act(turn)
        assert why in said["text"][0]["content"]
        assert not said["over"]
    (said,) = tools.act("", "The tool call cannot be read.")["text"]  # by the tokenizer
    assert said["content"] == "{'error': 'The tool call cannot be read.'}"


def test_the_calls_of_families():
    assert FORMATS["hermes"]("None here.") == []
    assert FORMATS["hermes"]('<tool_call>{"name": "f"}</tool_call>') == call("f")
    parse = FORMATS["llama"]
    assert parse('{"name": "f", "parameters": {"x": 1}}') == call("f", x=1)
    assert parse('<|python_tag|>{"type": "function", "name": "f", "parameters": {}}') == call("f")
    assert parse("The answer is {4}.") == []
    with pytest.raises(Malformed, match="not valid JSON"):
        parse('{"name": "f", "parameters": ')
    mine = own(people.backwards)
    assert mine("!shout it") == call("shout", text="it")
    with pytest.raises(Malformed, match="One ! is enough"):
        mine("!!shout it")
    assert format_of("… <tool_call> …", has_own=False) == "hermes"
    assert format_of("… <tool_call> <function=f> …", has_own=False) is None
    assert format_of("", has_own=True) == "tokenizer"


# Each plays: begins with "go", answers "a" with "b" for 0.5, and ends after "c" with 1.


def skyrl():
    class Env:
        def init(self, prompt):
            return [*prompt, {"role": "user", "content": "go"}], {}

        def step(self, action):
            seen = [] if action == "c" else [{"role": "user", "content": "b"}]
            return {"observations": seen, "reward": 1 if action == "c" else 0.5, "done": action == "c", "metadata": {}}

    return Env()


def gem():
    class Env:
        def reset(self, seed=None):
            return "go", {"seed": seed}

        def step(self, action):
            return ("", 1, False, True, {}) if action == "c" else ("b", 0.5, False, False, {})

    return Env()


def plain():
    class Env:
        def reset(self):
            return "go"

        def step(self, action):
            return ("", 1, True) if action == "c" else ("b", 0.5, False)

    return Env()


def textarena(listed=True):
    class Env:
        def reset(self, num_players, seed=None):
            self.new, self.all = [(-1, "go", 0)], "go"
            assert num_players == 1

        def get_observation(self):
            new, self.new = self.new, []
            return 0, new if listed else self.all

        def step(self, action):
            self.new += [(0, action, 1), (-1, "b", 2)]
            self.all += "b"
            return action == "c", {}

        def close(self):
            return {0: 1.5}, {}

    return Env()


def tinker():
    class Env:
        async def initial_observation(self):
            self.messages = [{"role": "user", "content": "go"}]
            return list(self.messages)

        async def step(self, message):
            await asyncio.sleep(0)
            self.messages += [message] if message["content"] == "c" else [message, {"role": "user", "content": "b"}]
            over = message["content"] == "c"
            return SimpleNamespace(reward=1.0 if over else 0.5, episode_done=over, next_messages=list(self.messages))

    return Env()


def openenv():
    class Env:
        def reset(self):
            return SimpleNamespace(observation="go", reward=None, done=False)

        def step(self, action):
            over = action == "c"
            return SimpleNamespace(observation="" if over else "b", reward=1.0 if over else 0.5, done=over)

    return Env()


def text_of(said):
    return said if isinstance(said, str) else "".join(each["content"] for each in said)


@pytest.mark.parametrize(
    "make",
    [skyrl, gem, plain, textarena, lambda: textarena(listed=False), tinker, openenv],
    ids=lambda make: make.__name__,
)
def test_games_of_every_shape_are_played_alike(make):
    made = make()
    assert is_game(made)
    game = Game(made)
    assert text_of(game.begin({"prompt": []}, seed=7)["text"]) == "go"
    first, last = game.act("a"), game.act("c")
    assert text_of(first["text"]) == "b"
    assert (first["over"], last["over"]) == (False, True)
    assert game.grade() == {"reward": 1.5}


def test_a_game_says_what_it_cannot_read():
    class Env:
        def reset(self):
            return 5

        def step(self, action):
            return {"nan": ("", float("nan"), False), "text": ("", "much", False), "two": (1, 2)}[action]

    game = Game(Env())
    with pytest.raises(TypeError, match="the observation is of type int"):
        game.begin({}, seed=1)
    for action, why in (("nan", "float32 cannot hold"), ("text", "not a number"), ("two", "type tuple with 2 parts")):
        with pytest.raises((TypeError, ValueError), match=why):
            game.act(action)


def test_a_method_step_that_returns_text_is_a_tool():
    class Env:
        def reset(self):
            return None

        def step(self, action: str) -> str:
            """
            Act.

            Args:
                action: What to do.
            """
            return action

    assert not is_game(Env())
    assert list(Tools(Env(), [], list).tools) == ["step"]


def test_a_real_game_of_textarena():
    textarena = pytest.importorskip("textarena")
    game = Game(textarena.make("GuessTheNumber-v0"))
    assert is_game(game.game)
    assert "number" in game.begin({}, seed=3)["text"]
    target = game.game.state.game_state["game_number"]
    other = 1 if target > 10 else 20
    first = game.act(f"[{other}]")
    assert ("higher" if target > other else "lower") in first["text"]
    assert "guess" not in first["text"].partition("[GAME]")[0].lower()  # what was shown before is not repeated
    last = game.act(f"[{target}]")
    assert last == {"text": "", "reward": 1.0, "over": True}
    assert game.grade() == {"reward": 1.0}
