import signal

import pytest
from ray.train.torch import TorchTrainer

from mars_platform.cluster.ray_private import with_own_interrupts, without_data_sets
from mars_train.run.stages import _recorded


def test_a_second_interrupt_does_not_wait_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGINT)
    with _recorded(signal.SIGINT) as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_termination_is_recorded_however_often_it_is_sent():
    with _recorded(signal.SIGTERM) as terminated:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert terminated()


def test_a_trainer_leaves_the_handler_of_interrupts_alone():
    method, before = "_register_sigint_handler", signal.getsignal(signal.SIGINT)
    assert hasattr(TorchTrainer, method)
    getattr(with_own_interrupts(TorchTrainer(print)), method)(None)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_actor_is_started_for_data_sets():
    trainer = TorchTrainer(print)
    usual = {type(each).__name__ for each in trainer._create_default_callbacks()}
    ours = {type(each).__name__ for each in without_data_sets(trainer)._create_default_callbacks()}
    assert usual - ours == {"DatasetsCallback"}
