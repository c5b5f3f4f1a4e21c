"""Discrete events in virtual time around the real machine.

The scheduler under test is the production one; ``cluster``, ``agents`` and ``training`` play the cells, the agents and
the trainer. Everything is seeded, and two runs with the same inputs are equal. Knows no policy.
"""

from __future__ import annotations

from gyre_sched import events as e
from gyre_sched.config import SchedConfig
from gyre_sched.errors import SchedError
from gyre_sched.policies import Policy

from .agents import Agents
from .cluster import Cluster
from .models import Hardware
from .result import Lane, SimResult
from .stage import Stage
from .training import Training
from .workload import Workload

__all__ = ["Lane", "SimResult", "Simulation", "simulate"]


class Simulation:
    """One run. ``train_cells``: how many cells (the core among them) start in TRAIN; 0: all sample, core
    included.
    """

    def __init__(
        self,
        hw: Hardware,
        workload: Workload,
        config: SchedConfig,
        policy: Policy,
        *,
        train_cells: int = 1,
        seed: int = 0,
        keep_lanes: bool = False,
    ) -> None:
        self.stage = Stage(hw, workload, config, policy)
        self.machine = self.stage.machine
        self.cluster = Cluster(self.stage, train_cells, seed, keep_lanes)
        self.agents = Agents(self.stage, self.cluster)
        self.training = Training(self.stage, self.cluster, self.agents)

    def begin(self) -> None:
        """Cells join, groups queue, time starts."""
        self.cluster.begin(self.agents.watch)
        self.agents.begin()
        self.stage.at(self.stage.config.tick_s, self._tick)

    def run(self, limit_s: float = 1e9) -> SimResult:
        """Play until the last step is applied."""
        self.begin()
        ends, steps = self.training.step_ends, self.stage.load.steps
        self.stage.play(lambda: len(ends) < steps, limit_s)
        if len(ends) < steps:
            raise SchedError(
                f"the simulated run stopped at {self.stage.now:.0f} s in step {len(ends)} of {steps}; "
                f"picture: {self.machine.view.picture()}"
            )
        return self.result()

    def _tick(self) -> None:
        self.stage.post(e.Tick(self.stage.now))
        self.stage.at(self.stage.now + self.stage.config.tick_s, self._tick)

    def result(self) -> SimResult:
        """What the run took and did."""
        sampling, training = self.cluster.finish()
        now, agents, trainer = self.stage.now, self.agents, self.training
        total = now * len(self.cluster.cells)
        return SimResult(
            seconds=now,
            step_ends=tuple(trainer.step_ends),
            idle_share=max(0.0, 1.0 - (sampling + training) / total),
            sampling_share=sampling / total,
            training_share=training / total,
            switches=self.machine.view.switches,
            moves=agents.moves,
            moves_carried=agents.carried,
            staleness=tuple(trainer.staleness),
            cut=agents.cuts,
            executions=agents.executions,
            skipped_cell_s=agents.skipped,
            events=self.stage.events,
            lanes=tuple(self.cluster.lanes),
            lost_cells=self.cluster.lost,
            computed_again=trainer.again,
        )


def simulate(
    hw: Hardware,
    workload: Workload,
    config: SchedConfig,
    policy: Policy,
    *,
    train_cells: int = 1,
    seed: int = 0,
    keep_lanes: bool = False,
) -> SimResult:
    """Run one simulation to its end."""
    sim = Simulation(hw, workload, config, policy, train_cells=train_cells, seed=seed, keep_lanes=keep_lanes)
    return sim.run()
