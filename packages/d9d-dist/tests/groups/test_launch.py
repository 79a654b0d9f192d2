import pytest

from d9d_dist import Launch, UserError, read_launch


def test_without_a_launcher_there_is_one_process() -> None:
    assert read_launch({}) == Launch()


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}


def test_variables_of_torchrun_are_read() -> None:
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, 1, 2, has_launcher=True)
    assert read_launch({**TORCHRUN, "D9D_DEVICE": "cpu"}).device == "cpu"


@pytest.mark.parametrize(
    ("changes", "num_nodes"),
    [({}, 2), ({"GROUP_WORLD_SIZE": "3"}, 3), ({"WORLD_SIZE": "9"}, 3), ({"LOCAL_WORLD_SIZE": "8"}, 1)],
)
def test_the_number_of_nodes_is_computed(changes: dict[str, str], num_nodes: int) -> None:
    assert read_launch({**TORCHRUN, **changes}).num_nodes == num_nodes


def test_missing_variables_default_to_one_node() -> None:
    assert read_launch({"RANK": "1", "WORLD_SIZE": "4"}) == Launch(1, 4, 1, 4, 0, 1, has_launcher=True)


SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_variables_of_slurm_are_read() -> None:
    assert read_launch(SLURM) == Launch(3, 4, 1, 2, 1, 2, has_launcher=True)


def test_slurm_tasks_per_node_are_optional() -> None:
    told = {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS_PER_NODE"}
    assert read_launch(told).local_world_size == 2


STEP = {
    **{name: value for name, value in SLURM.items() if not name.startswith("MASTER")},
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node3", "node3"),
        ("node[07-09,12]", "node07"),
        ("gpu-a[1,3]-ib,login", "gpu-a1-ib"),
        ("a.example.org,b", "a.example.org"),
    ],
)
def test_the_store_of_a_slurm_step_is_on_its_first_host(hosts: str, first: str) -> None:
    launch = read_launch({**STEP, "SLURM_STEP_NODELIST": hosts})
    assert launch == Launch(3, 4, 1, 2, 1, 2, has_launcher=True, store=(first, 20000 + 70 * 31 + 1))
    assert read_launch({**STEP, "MASTER_ADDR": "x"}).store == ("x", 20000 + 70 * 31 + 1)


@pytest.mark.parametrize(("node", "tasks"), [(0, 2), (1, 2), (2, 1), (3, 1)])
def test_the_tasks_of_a_node_are_those_of_the_slurm_step(node: int, tasks: int) -> None:
    """`srun --nodes 4 --ntasks 6` in a job of two tasks per node leaves SLURM_NTASKS_PER_NODE = 2."""
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_NODEID": str(node), "SLURM_NNODES": "4"}
    launch = read_launch({**step, "SLURM_STEP_NODELIST": "a[1-4]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)"})
    assert (launch.local_world_size, launch.world_size) == (tasks, 6)


def test_an_interactive_slurm_step_is_one_process() -> None:
    assert read_launch({"SLURM_NTASKS": "4"}) == Launch()
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}) == Launch()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "SLURM_NTASKS = 4, but neither MASTER_ADDR nor SLURM_STEP_NODE"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a[1-2]"}, "Start the tasks with srun"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "but not MASTER_ADDR and MASTER_PORT"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, "PMI_SIZE = 2, but not MASTER_PORT"),
        ({"RANK": "1"}, "got RANK = 1 without WORLD_SIZE; expected both or neither"),
        ({"WORLD_SIZE": "2"}, "got WORLD_SIZE = 2 without RANK; expected both or neither"),
    ],
)
def test_ranks_that_cannot_connect_do_not_train_alone(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_launch(variables)


def test_one_task_or_rank_is_one_process() -> None:
    assert read_launch({"WORLD_SIZE": "1"}) == Launch()
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}) == Launch()


def test_variables_of_mpi_are_read() -> None:
    variables = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    assert read_launch(variables) == Launch(3, 4, 1, 2, 1, 2, has_launcher=True)


def test_refuses_a_rank_outside_the_world() -> None:
    with pytest.raises(UserError, match=r"rank = 4 and world size = 4; expected 0 <= rank < world size. Start the job"):
        read_launch({"RANK": "4", "WORLD_SIZE": "4"})


def test_refuses_variables_that_are_not_integers() -> None:
    with pytest.raises(UserError, match=r"environment variable WORLD_SIZE = 'four'; expected an integer"):
        read_launch({"RANK": "0", "WORLD_SIZE": "four"})
