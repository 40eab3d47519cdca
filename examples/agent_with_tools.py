"""Answer a question with tools: the model picks one, fills in its arguments, reads what it gave.

python examples/agent_with_tools.py
python examples/agent_with_tools.py "Is the lamp in stock?" --backend http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

import umbel as ub

Number = Annotated[int, Field(ge=0, le=99_999)]
Item = Literal["kettle", "lamp", "radio", "toaster"]

SHOP: dict[Item, tuple[int, int]] = {  # price and stock
    "kettle": (39, 4),
    "lamp": (25, 0),
    "radio": (80, 11),
    "toaster": (45, 2),
}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


# A tool is a model of its arguments. Its docstring is what the model is told, its fields what the
# model must fill in, and `run` what happens then.


class LookUp(BaseModel):
    """price and stock of an item"""

    item: Item

    def run(self) -> str:
        price, stock = SHOP[self.item]
        return f"the {self.item} costs {price} euros; {stock} are in stock"


class Calculate(BaseModel):
    """arithmetic with two numbers"""

    left: Number
    operator: Literal["+", "-", "*", "/"]
    right: Number

    def run(self) -> str:
        result = OPERATORS[self.operator](self.left, self.right)
        return f"{self.left} {self.operator} {self.right} = {result:g}"


Tool = LookUp | Calculate
TOOLS: dict[str, type[Tool]] = {"look_up": LookUp, "calculate": Calculate}
MANUAL = "\n".join(f"- {name}: {tool.__doc__}" for name, tool in TOOLS.items())


@ub.function
def agent(s: ub.State, question: str, max_steps: int = 4) -> str:
    """Use tools until the model wants to answer, or has used `max_steps` of them."""
    s += ub.system(
        f"You answer questions about a shop. Your tools:\n{MANUAL}\n"
        "In each turn use one tool, or answer when you know enough."
    )
    s += ub.user(question)
    for _ in range(max_steps):
        with s.assistant():
            s += "Next: " + ub.select("next", [*TOOLS, "answer"])
            if s["next"] == "answer":
                break
            call = ub.gen("call", schema=TOOLS[s["next"]], max_tokens=64)
            s += "\nArguments: " + call
        s += ub.user(f"Result: {run_tool(s, call)}")
    s += ub.user("Now answer in one sentence.")
    s += ub.assistant("Answer:" + ub.gen("answer", max_tokens=48, stop="\n"))
    return str(s["answer"]).strip()


def run_tool(s: ub.State, call: ub.GenExpr[Tool]) -> str:
    """Return what a tool gave; what went wrong is told to the model, which may do better."""
    try:
        return s[call].run()
    except (ArithmeticError, ub.TruncatedError) as error:
        return f"error: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("question", nargs="?", default="What do three kettles cost?")
    parser.add_argument("--model", default="smollm2", help="alias, GGUF file, folder or hub id")
    parser.add_argument("--backend", help="URL of an umbel server, instead of a model in process")
    parser.add_argument("--max-steps", type=int, default=4)
    args = parser.parse_args(argv)

    backend = ub.connect(args.backend or args.model)
    try:
        program = agent.options(backend=backend)
        result = program.run(args.question, max_steps=args.max_steps)
        for message in result.messages[1:]:
            print(f"{message['role']:>9}  {' '.join(message['content'].split())}")
    finally:
        backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
