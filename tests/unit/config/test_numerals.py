from bapo.config.numerals import counted, every


def test_a_number_has_the_noun_that_belongs_to_it():
    assert [counted(n, "update") for n in (0, 1, 2, 1200)] == ["0 updates", "1 update", "2 updates", "1,200 updates"]
    assert [counted(n, "pass", "passes") for n in (1, 4)] == ["1 pass", "4 passes"]
    assert [every(n, "step") for n in (1, 10)] == ["every step", "every 10 steps"]
