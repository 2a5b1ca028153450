"""Answers that a verifier must survive, drawn from a seed: monsters of computation, of syntax and of text.

Each draw is one (ground truth, response). Two arguments write a whole trial of them:

    python tests/hostile_answers.py COUNT SECONDS      verify so many in the sandbox and print what they cost
"""

import queue
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

GOLDS = [
    "72",
    r"\frac{1}{2}",
    r"\left( 3, \frac{\pi}{2} \right)",
    r"\text{Evelyn}",
    "x^2+1",
    r"(-\infty, 2) \cup (3, \infty)",
]
GOLDS += [r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", "1,-2", "x=5", r"50\%", "52_8", r"\{1\pm\sqrt{5},-2\}"]
ALPHABET = r"\{}[]()^_$%&#~'\"!?,.;:+-*/=<>|0123456789abcxyzπ√∞≤∈−٣७𝟗" + "\x00\u202e\u200b\ud800\ufffe\n\t "
COMMANDS = [
    r"\frac",
    r"\sqrt",
    r"\sum",
    r"\prod",
    r"\int",
    r"\lim",
    r"\left(",
    r"\right)",
    r"\binom",
    r"\infty",
    r"\pm",
]
COMMANDS += [r"\cup", r"\text{", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "&", r"\boxed{", "}", "{", r"\log"]
COMMANDS += [r"\sin", r"\mathbb{R}", r"\in", r"\to", "^", "_", "!", r"\%", r"\ldots"]
BRACKETS = [("{", "}"), ("(", ")"), (r"\frac{1}{1+", "}"), (r"\sqrt{2+", "}"), (r"\left[", r"\right]")]
TERMS = ["n^n", r"\frac{1}{n^n}", r"\sin(n^2)", "n!", r"\frac{\sin x^x}{x^{\sqrt{2}}}", r"\prod_{k=1}^{n} k^k"]
PIECES = [r"\boxed{1} ", "$1$ and ", "the answer is ", "9", r"\frac{", "$", "(", "1+", "\x00", "answer: = ", " , "]
FRAMES = [r"\boxed{%s}", r"\boxed{%s", r"The answer is $%s$.", r"The answer is %s.", "#### %s", "%s", r"\[%s\]"]
FRAMES += [r"<think>%s</think> \boxed{72}", r"so \boxed{%s} or \boxed{x}", "%s </think> %s", r"\boxed{72} %s"]


def tower(rng):
    return "^{".join(str(rng.randint(2, 9)) for _ in range(rng.randint(3, 9))) + "}" * 8


def factorials(rng):
    inner = str(rng.randint(3, 99))
    for _ in range(rng.randint(1, 5)):
        inner = f"({inner}!)"
    return rng.choice([inner, rf"\frac{{{inner}}}{{{inner}+1}}", rf"\binom{{{inner}}}{{{rng.randint(2, 10**6)}}}"])


def nested(rng):
    depth = rng.choice([5, 20, 100, 160, 1000])
    opening, closing = rng.choice(BRACKETS)
    return opening * depth + "1" + closing * rng.choice([depth, depth - 1, 0])


def digits(rng):
    return "9" * rng.choice([50, 300, 999, 5000, 10**6]) + rng.choice(["", ".5", "/7", "!", "%"])


def matrix(rng):
    side = rng.choice([3, 8, 12])
    row = " & ".join(rng.choice(["x", r"\sqrt{2}", "1/3", "9^{99}"]) for _ in range(side))
    body = rf"\begin{{pmatrix}} {(row + chr(92) * 2) * side} \end{{pmatrix}}"
    return body + rng.choice(["", f"^{{{rng.choice([2, 50, 10**6])}}}", "^{-1}"])


def calculus(rng):
    bound = rng.choice(["10", "10^6", "10^{12}", r"\infty", "9^{9^9}"])
    term = rng.choice(TERMS)
    return rng.choice([
        rf"\sum_{{n=1}}^{{{bound}}} {term}", rf"\prod_{{n=1}}^{{{bound}}} {term}", rf"\int_0^{{{bound}}} {term} dx",
        rf"\lim_{{x \to {bound}}} {term}", rf"\int \int \int {term} dx dy dz", rf"\log_{{{bound}}} {term}",
    ])  # fmt: skip


def algebra(rng):
    power = rng.choice([3, 30, 300, 10**5])
    return rng.choice([
        f"(x+y+z+1)^{{{power}}}", f"((x+1)^{{{power}}}-1)/x", rf"\sqrt[{power}]{{x^{{{power}}}+1}}",
        rf"x^{{{power}}}+x+1=0", "+".join(f"x_{{{i}}}" for i in range(power % 1000)), f"1 < x^{{{power}}} < 2",
        "+".join(rf"\sqrt{{{rng.randint(2, 99)}+\sqrt{{{rng.randint(2, 99)}}}}}" for _ in range(rng.randint(2, 9))),
        r"\{" + ",".join(rf"\pm\sqrt{{{i}}}" for i in range(2, 2 + power % 50)) + r"\}", rf"10^{{-{power}}}",
    ])  # fmt: skip


def code(rng):
    return rng.choice([
        "__import__('os').system('kill -9 $PPID')", "().__class__.__bases__[0]", "exec('while 1: pass')", "$(sleep 60)",
        "lambda: 1", "os._exit(1)", "{{7*7}}", "%s%n", "9**9**9**9", "(9**9)**(9**9)", "1<<10**10", "'a'*10**10",
        "eval(input())", "\\input{/etc/passwd}", "\\def\\x{\\x\\x}\\x", "\\loop\\iftrue\\repeat", "`sleep 60`",
    ])  # fmt: skip


def noise(rng):
    return "".join(rng.choice(ALPHABET) for _ in range(rng.choice([1, 5, 40, 400, 3000])))


def commands(rng):
    return " ".join(rng.choice(COMMANDS) for _ in range(rng.choice([3, 12, 60])))


def megabytes(rng):
    piece = rng.choice(PIECES)
    return (piece * (10**6 // len(piece) + 1))[: rng.choice([10**4, 10**5, 10**6, 3 * 10**6])]


MONSTERS = [tower, factorials, nested, digits, matrix, calculus, algebra, code, noise, commands, megabytes]


def draws(count, seed=0):
    """So many (ground truth, response)."""
    rng = random.Random(seed)
    for _ in range(count):
        monster = rng.choice(MONSTERS)(rng)
        write = rng.choice(FRAMES)
        yield rng.choice(GOLDS), write.replace("%s", monster)


def main(count, seconds):
    from bapo.tasks.verify.sandbox import VerifierPool

    pools = queue.SimpleQueue()
    for _ in range(2):
        pools.put(VerifierPool("bapo.tasks.verify.math:verify", workers=1, seconds=seconds))

    def timed(draw):
        pool, started = pools.get(), time.perf_counter()
        (score,) = pool.scores([draw])
        pools.put(pool)
        return time.perf_counter() - started, score, draw[1][:80]

    started = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(timed, draws(count)))
    print(f"{count} answers, two at a time, {seconds:g} s each: {time.perf_counter() - started:.0f} s")
    print("rewards", dict(Counter(score.reward for _, score, _ in results)))
    print("failures", Counter(score.failure for _, score, _ in results if score.reward is None).most_common())
    for spent, score, text in sorted(results, key=lambda result: -result[0])[:5]:
        print(f"  {spent:6.2f} s  {score.failure:20} {text!r}")
    print(f"  longest without failure {max(spent for spent, score, _ in results if not score.failure):.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
