"""Reads a scenario line by line, plays it on a protocol's pure core, and gives the trace.

A scenario is a text file. Its first command names the protocol and its settings; every other command is one
event. Lines that begin with `#` explain. Indented lines are the trace of the command above them: the state
where it changed, and each action after an arrow.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from yatt.core.attempts import deadman
from yatt.core.gpus import lease
from yatt.core.phases import phases
from yatt.core.phases.phases import Program
from yatt.core.requests.dispatch import Dispatch

Play = Callable[[str], list[str]]


def played(text: str) -> str:
    """The scenario with the trace as it is now."""
    lines: list[str] = []
    play: Play | None = None
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        if play is None:
            name, *words = line.split()
            play = PROTOCOLS[name](_settings(words))
        else:
            lines += [f"  {trace}" for trace in play(line)]
    return "\n".join(lines) + "\n"


def _settings(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _changed(before: str, after: str) -> list[str]:
    return [after] if after != before else []


# ---- leases -------------------------------------------------------------------------------------


def lease_play(settings: dict[str, str]) -> Play:
    """`at S want ROLE|nobody`; also `beat TOKEN PROGRESS`, `released TOKEN`, `died ROLE`, `memory free|TEXT`,
    `tick`."""
    timing = lease.Timing(**{f"{name}_s": float(value) for name, value in settings.items()})
    state = lease.SlabLease()

    def play(line: str) -> list[str]:
        nonlocal state
        _, now_s, name, *words = line.split()
        before, rest = _lease_words(state), " ".join(words)
        event: lease.Event = {
            "want": lambda: lease.Want("" if rest == "nobody" else rest),
            "beat": lambda: lease.Beat(int(words[0]), int(words[1])),
            "released": lambda: lease.Released(int(rest)),
            "died": lambda: lease.Died(rest),
            "memory": lambda: lease.MemoryChecked(rest == "free", "" if rest == "free" else rest),
            "tick": lease.Tick,
        }[name]()
        state, actions = lease.step(state, event, float(now_s), timing)
        return [*_changed(before, _lease_words(state)), *(f"-> {_words(action)}" for action in actions)]

    return play


def _lease_words(state: lease.SlabLease) -> str:
    by = f" by {state.holder}" if state.holder else ""
    wanted = f", wanted by {state.wanted}" if state.wanted != state.holder and state.wanted else ""
    return f"{state.stage.value}{by}, token {state.token}{wanted}"


# ---- phases -------------------------------------------------------------------------------------


def phases_play(settings: dict[str, str]) -> Play:
    """`start`, `all answer`, `answer NODE`, `acted [again] [resumed=N]`, `stop WHY`, `fail CODE WHY`,
    `symptom CODE WHY`, `patience over`, `lose NODE WHY`."""
    program = Program(
        nodes=frozenset(range(int(settings["nodes"]))),
        trainer_nodes=frozenset(range(int(settings["trainer_nodes"]))),
        pools={"rollout": frozenset(map(int, settings["rollout"].split(",")))},
        total_iterations=int(settings["iterations"]), save_every=int(settings["save_every"]),
        validate_every=0, validates=False, num_scorings=int(settings.get("scorings", "0")),
    )  # fmt: skip
    state: phases.RunState | None = None

    def play(line: str) -> list[str]:
        nonlocal state
        before = _phase_words(state)
        found: list[phases.Action] = []
        if line == "start":
            state, actions = phases.start_phases(program)
            found += actions
        for event in _phase_events(line, state) if line != "start" and state else ():
            state, actions = phases.step(state, event, program)
            found += actions
        return [*_changed(before, _phase_words(state)), *_phase_actions(found)]

    return play


def _phase_events(line: str, state: phases.RunState) -> list[phases.Event]:
    name, _, rest = line.partition(" ")
    first, _, why = rest.partition(" ")
    resumed = re.search(r"resumed=(\d+)", rest)
    acted = phases.Acted(state.seq, again="again" in rest, resumed=int(resumed[1]) if resumed else 0)
    made: dict[str, Callable[[], list[phases.Event]]] = {
        "all": lambda: [phases.OrderAnswered(node, state.seq) for node in state.owed],
        "answer": lambda: [phases.OrderAnswered(int(rest), state.seq)],
        "acted": lambda: [acted],
        "stop": lambda: [phases.StopWanted(rest)],
        "fail": lambda: [phases.Failure(why, int(first))],
        "symptom": lambda: [phases.Failure(why, int(first), is_symptom=True)],
        "committed": lambda: [phases.Committed(int(first))],
        "save_failed": lambda: [phases.SaveFailed(int(first), why)],
        "patience": lambda: [phases.PatienceOver()],
        "lose": lambda: [phases.NodeLost(int(first), why, state.life_of(int(first)))],
        "knock": lambda: [phases.NodeKnocked(int(first), int(why))],
        "ready": lambda: [phases.NodeReady(int(first), state.life_of(int(first)))],
    }
    return made[name]()


def _phase_words(state: phases.RunState | None) -> str:
    if state is None:
        return ""
    owed = f", waiting for {', '.join(f'node{n}' for n in sorted(state.owed))}" if len(state.owed) else ""
    saving = state.saving
    flying = f", save {saving.in_flight} in flight" if saving.in_flight else ""
    done = f"trained {state.trained}, saved {saving.committed}"
    return f"{state.phase.value} {state.part.value}, {done}{flying}{owed}"


def _phase_actions(actions: list[phases.Action]) -> list[str]:
    orders = [a for a in actions if isinstance(a, phases.PhaseOrder)]
    others = [f"-> {_words(a)}" for a in actions if not isinstance(a, phases.PhaseOrder)]
    if not orders:
        return others
    first, nodes = orders[0], ", ".join(f"node{order.node}" for order in orders)
    return [*others, f"-> {first.part.value} {first.phase.value} to {nodes}"]


# ---- dispatch -----------------------------------------------------------------------------------


def dispatch_play(settings: dict[str, str]) -> Play:
    """`serve SERVER ROOM`, `submit KEY [GROUP]`, `died SERVER`, `leave SERVER`, `done KEY`, `bounce KEY`;
    servers with room get calls after each."""
    rules = Dispatch(patience=int(settings["patience"]), isolates=settings.get("isolates") == "yes")

    def play(line: str) -> list[str]:
        name, first, *words = line.split()
        over: list[str] = []
        match name:
            case "serve":
                rules.serve(first, "pool", int(words[0]))
            case "submit":
                rules.submit(first, "pool", words[0] if words else "", 0)
            case "died":
                over = rules.died(first)
            case "leave":
                rules.leave(first)
            case "done":
                rules.done(first)
            case "bounce":
                rules.bounce(first)
            case _:
                raise AssertionError(f"{line}: no event of this protocol")
        bound = [f"-> {each.key} to {each.server}" for each in rules.assign()]
        return [*(f"{key} is over" for key in over), *bound]

    return play


# ---- dead-man's switch --------------------------------------------------------------------------


def deadman_play(settings: dict[str, str]) -> Play:
    """`at S look SILENCE COUNTER|none`, `slurm same|died|over|unknown`, `claim mine|another|none`,
    `requeued`."""
    limits = replace(deadman.Limits(), **{f"{name}_s": float(value) for name, value in settings.items()})
    state = deadman.Observer()

    def play(line: str) -> list[str]:
        nonlocal state
        words = line.split()
        event: deadman.Event
        match words:
            case ["at", now_s, "look", silence_s, counter]:
                number = None if counter == "none" else int(counter)
                event = deadman.Look(float(now_s), float(silence_s), number)
            case ["slurm", job]:
                event = deadman.SlurmSaid(deadman.Job(job))
            case ["claim", whose]:
                event = deadman.ClaimTried({"mine": True, "another": False, "none": None}[whose])
            case ["requeued"]:
                event = deadman.RequeueReturned()
            case _:
                raise AssertionError(f"{line}: no event of this protocol")
        before = state.stage.value
        state, action = deadman.step(state, event, limits)
        told = [] if action is deadman.Action.NOTHING else [f"-> {action.value}"]
        return [*_changed(before, state.stage.value), *told]

    return play


def _words(action: object) -> str:
    """An action's name and values, as text."""
    name = re.sub(r"(?<!^)([A-Z])", r" \1", type(action).__name__).lower()
    hidden = ("seq",)
    slots: tuple[str, ...] = getattr(type(action), "__slots__", ())
    values = [f"{slot}={getattr(action, slot)!s}" for slot in slots if slot not in hidden]
    values = [re.sub(r"Phase\.(\w+)", lambda m: m[1].lower(), value) for value in values]
    return " ".join([name, *values])


PROTOCOLS: dict[str, Callable[[dict[str, str]], Play]] = {
    "lease": lease_play, "phases": phases_play, "dispatch": dispatch_play, "deadman": deadman_play,
}  # fmt: skip
