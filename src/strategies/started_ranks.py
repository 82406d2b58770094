"""What Lightning is told about ranks that are running already: their numbers and where they meet."""

from dataclasses import dataclass

from lightning.pytorch.plugins import ClusterEnvironment


@dataclass(frozen=True)
class StartedRanks(ClusterEnvironment):
    """One rank's place in the world. Lightning starts no process, detects nothing and changes nothing of it."""

    rank: int
    local_rank_: int
    node_rank_: int
    world_size_: int
    address: str
    port: int

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.address

    @property
    def main_port(self) -> int:
        return self.port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.world_size_

    def set_world_size(self, size: int) -> None:
        """Known from the start."""

    def global_rank(self) -> int:
        return self.rank

    def set_global_rank(self, rank: int) -> None:
        """Known from the start."""

    def local_rank(self) -> int:
        return self.local_rank_

    def node_rank(self) -> int:
        return self.node_rank_
