"""The ``repr`` of containers and results: short, for people, and never an exception."""

from tensordict import TensorDict, lazy_stack

from corelm import History
from corelm.spec.message import Message
from helpers.each import each
from helpers.four_rows import batch, both_layouts


@both_layouts
def test_every_container_says_what_it_holds(pad_output: bool) -> None:
    td = batch((4,), pad_output)
    assert repr(td["tokens"]) == "Tokens(4 rows: prompt, response, full)"
    assert repr(td["text"]) == "Text(4 rows: prompt, response, full)"
    assert repr(History.from_chats([[[Message("user", "a")]] * 2])) == "History(2 rows as (1, 2): conversation)"


@both_layouts
@each("shape", [(), (4,), (2, 2)])
def test_a_result_can_be_printed_alone_nested_and_stacked(shape: tuple[int, ...], pad_output: bool) -> None:
    td = batch((4,), pad_output)[1] if shape == () else batch(shape, pad_output)
    if len(shape) == 1:
        td["text"].response = ["\x1b[2J", "b", "c", "d"]
    for printed in (td, TensorDict({"next": td}), lazy_stack([td, td])):
        assert "\x1b" not in repr(printed) and "tokens" in repr(printed)
