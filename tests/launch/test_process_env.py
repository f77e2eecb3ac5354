"""A process finds its place in a job from what started it, in full or not at all."""

import pytest

from meshloom.launch import gpus, process_env, schedulers

OWN = {
    "MESHLOOM_COORDINATOR": "a:1234",
    "MESHLOOM_NUM_PROCESSES": "4",
    "MESHLOOM_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# As mpirun of Open MPI 4.1.4 sets them.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "267649024.0;tcp://192.0.2.2:32929;tcp6://[fd00::2]:6099",
    "PMIX_NAMESPACE": "267649025",
}
# As mpiexec of MPICH sets them.
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0,t1,t2"}
KUBEFLOW = {
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "job-0.job:6666",
}


def changed(env: dict, **changes: str | None) -> dict:
    return {k: v for k, v in {**env, **changes}.items() if v is not None}


def test_nothing_said_is_no_job():
    assert process_env.find({}) is None


def test_own_variables():
    found = process_env.find(OWN)
    assert found == process_env.ProcessEnv("a:1234", 4, 3, "MESHLOOM variables")
    assert found.address == ("a", 1234)
    assert found.describe("h") == (
        "process 3 of 4 on host h, found from MESHLOOM variables; coordinator a:1234"
    )


def test_hosts_give_the_place_on_a_host():
    found = process_env.find(OWN | {"MESHLOOM_HOSTS": "a,b,a,b"})
    assert (found.local_id, found.local_count, found.num_hosts) == (1, 2, 2)
    assert found.name(3) == "process 3 on b"


def test_own_variables_win_when_they_say_everything():
    found = process_env.find(OWN | SLURM)
    assert (found.process_id, found.source) == (3, "MESHLOOM variables")


def test_slurm_alone():
    found = process_env.find(SLURM)
    assert (found.num_processes, found.process_id, found.num_hosts) == (4, 2, 2)
    assert (found.local_id, found.local_count) == (0, 2)
    assert found.hosts == ("node08", "node08", "node09", "node09")
    host, port = found.address
    assert host == "node08" and port in schedulers.PORTS
    other = process_env.find(changed(SLURM, SLURM_STEP_ID="1"))
    assert other.address[1] != port
    assert process_env.find(changed(SLURM, SLURM_RESTART_COUNT="1")).address[1] != port
    dealt = process_env.find(changed(SLURM, SLURM_DISTRIBUTION="cyclic"))
    assert dealt.hosts == () and dealt.num_hosts == 2


def test_a_launcher_knows_the_coordinator_and_slurm_the_rest():
    found = process_env.find(SLURM | {"MESHLOOM_COORDINATOR": "x:1"})
    assert (found.coordinator, found.process_id, found.source) == ("x:1", 2, "Slurm")


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # a batch script
        {"SLURM_STEP_ID": "4294967291"},  # the same, as newer versions say it
        {"SLURM_STEP_ID": "4294967290"},  # a shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
    ],
)
def test_slurm_variables_without_tasks_are_no_job(changes):
    assert process_env.find(changed(SLURM, **changes)) is None
    with pytest.raises(ValueError, match="MESHLOOM_NUM_PROCESSES.*is not set"):
        process_env.find(changed(SLURM, MESHLOOM_COORDINATOR="a:1", **changes))


def test_a_contradiction_is_an_error():
    with pytest.raises(ValueError, match="PROCESS_ID is 1, but Slurm says 2. Set all"):
        process_env.find(changed(SLURM, MESHLOOM_PROCESS_ID="1"))
    found = process_env.find(changed(SLURM, MESHLOOM_PROCESS_ID="2"))
    assert found.process_id == 2


@pytest.mark.parametrize(
    "text, names",
    [
        ("n[0-1,4],m7", ["n0", "n1", "n4", "m7"]),
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("r[1-2]n[0-1].x", ["r1n0.x", "r1n1.x", "r2n0.x", "r2n1.x"]),
        ("", []),
    ],
)
def test_node_lists(text, names):
    assert schedulers.expand(text) == names


def test_open_mpi_on_one_host_and_on_several():
    found = process_env.find(OPEN_MPI)
    assert (found.num_processes, found.process_id) == (2, 1)
    assert (found.source, found.num_hosts, found.local_id) == ("Open MPI", 1, 1)
    assert found.address[0] == "127.0.0.1"
    port = found.address[1]
    assert process_env.find(changed(OPEN_MPI, PMIX_NAMESPACE="9")).address[1] != port
    local = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    across = OPEN_MPI | local
    found = process_env.find(across)
    assert found.address == ("192.0.2.2", port) and found.num_hosts == 2
    with pytest.raises(ValueError, match="`meshloom launch mpi`, or set MESHLOOM_COO"):
        process_env.find(changed(across, OMPI_MCA_orte_hnp_uri=None))


def test_mpich_on_one_host_and_on_several():
    found = process_env.find(MPICH)
    assert (found.source, found.address[0], found.num_hosts) == (
        "MPICH",
        "127.0.0.1",
        1,
    )
    across = changed(MPICH, MPI_LOCALNRANKS="1", MPI_LOCALRANKID="0")
    with pytest.raises(ValueError, match="MPICH does not say.*`meshloom launch mpi`"):
        process_env.find(across)
    assert process_env.find(across | {"MESHLOOM_COORDINATOR": "a:1"}).process_id == 1


def test_mpi_inside_slurm_counts_and_pmi_of_srun_does_not():
    assert process_env.find(SLURM | OPEN_MPI).source == "Open MPI"
    assert process_env.find(SLURM | MPICH).source == "MPICH"
    assert (
        process_env.find(SLURM | {"PMI_RANK": "2", "PMI_SIZE": "4"}).source == "Slurm"
    )


@pytest.mark.parametrize(
    "env", [OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, MPICH | {"PMI_SIZE": "1"}]
)
def test_mpi_with_one_process_is_no_job(env):
    assert process_env.find(env) is None


def test_kubernetes():
    assert process_env.find({"JOB_COMPLETION_INDEX": "1"}) is None
    ours = changed(OWN, MESHLOOM_PROCESS_ID=None, JOB_COMPLETION_INDEX="1")
    found = process_env.find(ours)
    assert (found.process_id, found.source) == (1, "Kubernetes")
    with pytest.raises(ValueError, match="NUM_PROCESSES is not set. Kubernetes does"):
        process_env.find(changed(ours, MESHLOOM_NUM_PROCESSES=None))


def test_the_number_in_a_jobset_of_several_jobs():
    ours = changed(
        OWN,
        MESHLOOM_PROCESS_ID=None,
        MESHLOOM_NUM_PROCESSES="8",
        JOB_COMPLETION_INDEX="1",
        MESHLOOM_JOB_INDEX="1",
        MESHLOOM_PROCESSES_PER_JOB="4",
    )
    assert process_env.find(ours).process_id == 5
    with pytest.raises(ValueError, match="MESHLOOM_PROCESSES_PER_JOB is not. Set both"):
        process_env.find(changed(ours, MESHLOOM_PROCESSES_PER_JOB=None))


def test_a_job_of_one_process_needs_no_number():
    ours = changed(OWN, MESHLOOM_PROCESS_ID=None, MESHLOOM_NUM_PROCESSES="1")
    assert process_env.find(ours).process_id == 0


def test_kubeflow():
    found = process_env.find(KUBEFLOW)
    assert (found.coordinator, found.num_processes, found.process_id) == (
        "job-0.job:6666",
        2,
        1,
    )
    with pytest.raises(
        ValueError, match="PROCESS_ID is not set. Kubeflow would set JAX_PROCESS_ID"
    ):
        process_env.find(changed(KUBEFLOW, JAX_PROCESS_ID=None))


def test_cloud_tpu():
    found = process_env.find(TPU)
    assert (found.coordinator, found.num_processes, found.process_id) == (
        "t0:8482",
        3,
        1,
    )
    assert found.hosts == ("t0", "t1", "t2")
    assert process_env.find({**TPU, "TPU_WORKER_HOSTNAMES": "localhost"}) is None
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "s0:8080",
    }
    found = process_env.find(TPU | slices)
    assert (found.coordinator, found.num_processes, found.process_id) == (
        "s0:8482",
        6,
        4,
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"MESHLOOM_COORDINATOR": "a"}, "expected host:port"),
        ({"MESHLOOM_COORDINATOR": "a:0"}, "0 is not a port"),
        ({"MESHLOOM_COORDINATOR": "::1:70"}, r"in brackets: \[::1\]:70"),
        ({"MESHLOOM_PROCESS_ID": "4"}, "is 4, but MESHLOOM_NUM_PROCESSES is 4"),
        ({"MESHLOOM_HOSTS": "a,b"}, "expected 4 host names"),
        ({"MESHLOOM_LOCAL_ID": "0"}, "set both"),
        ({"MESHLOOM_LOCAL_ID": "2", "MESHLOOM_LOCAL_COUNT": "2"}, "number them from 0"),
        ({"MESHLOOM_JOIN_SECONDS": "0"}, "must be at least 1, got 0"),
        ({"MESHLOOM_JOIN_SECONDS": "soon"}, "must be a whole number, got 'soon'"),
    ],
)
def test_what_cannot_be_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        process_env.find(OWN | changes)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "[::1]", "localhost"])
def test_loopback_does_not_serve_several_hosts(host):
    env = OWN | {"MESHLOOM_COORDINATOR": f"{host}:12"}
    assert process_env.find(env | {"MESHLOOM_HOSTS": "a,a,a,a"}).num_hosts == 1
    with pytest.raises(
        ValueError, match="other hosts cannot reach it, and.*runs on 2 hosts"
    ):
        process_env.find(env | {"MESHLOOM_HOSTS": "a,a,b,b"})


def test_gpus_are_divided():
    assert gpus.share({}, 8, 1, 4) == "2,3"
    listed = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a,GPU-b"}
    assert gpus.share(listed, 8, 0, 2) == "4,5"
    assert gpus.share(listed, 8, 1, 2) == "GPU-a,GPU-b"
    assert gpus.share({}, 0, 1, 4) is None
    assert gpus.share({"CUDA_VISIBLE_DEVICES": ""}, 8, 1, 4) is None
    assert gpus.share({}, 8, 0, 1) is None
    with pytest.raises(ValueError, match="has 8 GPUs .* among 3 processes"):
        gpus.share({}, 8, 1, 3)
    with pytest.raises(ValueError, match="has 2 GPUs .* among 4 processes"):
        gpus.share({}, 2, 1, 4)


def test_gpus_of_the_driver_are_counted(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert gpus.num_installed(tmp_path / "gpus") == 2
    assert gpus.num_installed(tmp_path / "none") == 0
