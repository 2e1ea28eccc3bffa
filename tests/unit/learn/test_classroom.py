"""The files of a class: naming schemes, rosters, archives, the exercise that a file answers, results and points."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

import regard
from regard.learn import exercises
from regard.learn.exercises import CheckedSubmission, ClassReport, Student, Submission, SubmissionResult
from regard.learn.exercises.catalog import EXERCISES
from regard.learn.exercises.classroom import NUMBER, find_exercises, match_student
from tests.helpers.class_files import (
    FILES,
    HALF,
    MASKS,
    ROSTER,
    SKIPPED,
    THREE,
    expect_results,
    make_notebook,
    write_class,
)


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_if_allowed(folder: Path, name: str, text: str) -> None:
    try:
        write(folder, name, text)
    except OSError:
        pytest.skip("the file system refuses this name")


@pytest.fixture(scope="module")
def roster(tmp_path_factory):
    return exercises.read_roster(write(tmp_path_factory.mktemp("roster"), "roster.csv", ROSTER))


def test_a_class_with_files_of_every_kind(tmp_path, roster):
    submissions, skipped = exercises.find_submissions(write_class(tmp_path), roster=roster)
    assert {it.path.as_posix(): (it.student, it.reason) for it in skipped}.keys() == SKIPPED.keys()
    assert all(
        SKIPPED[it.path.as_posix()][0] == it.student and SKIPPED[it.path.as_posix()][1] in it.reason
        for it in skipped
    )
    assert len(submissions) == sum(len(results) for *_, results in FILES)
    endless = [it for it in submissions if "endless" in it.path.name]
    reports = [
        exercises.check_class(files, timeout=timeout)
        for files, timeout in ((endless, 5), ([it for it in submissions if it not in endless], 120))
    ]
    report = ClassReport(tuple(row for it in reports for row in it.rows), roster, tuple(skipped))
    assert {place: row.result.summary for place, row in report.best.items()} == expect_results()
    assert report.absent == ("Val Absent",)
    assert report.strangers == ("=cmd", "anon_x7Yz2", "Zed Unknown")
    assert [row.submission.student for row in report.rows if row.submission.late] == ["Dee Müller"]
    assert max(len(hint) for row in report.rows for hint in row.result.hints) < 500
    assert report.count_points("Ned Ash") == 7 and report.count_points("Uma Bell") == 0


def test_an_archive_has_the_same_submissions_as_its_folder(tmp_path, roster):
    folder = write_class(tmp_path / "files")
    expected, _ = exercises.find_submissions(folder, roster=roster)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as inner:
        inner.writestr("mine/exercise-3.py", THREE)
    for wrapper in ("", "CS101-Homework 1-4711/"):
        path = tmp_path / "class.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in (it for it in folder.rglob("*") if it.is_file()):
                archive.write(file, wrapper + file.relative_to(folder).as_posix())
            archive.writestr(f"{wrapper}absentval_LATE_1022_777_work.zip", packed.getvalue())
            archive.writestr(f"{wrapper}uma bell/broken.zip", b"PK\x03\x04")
        with exercises.open_submissions(path) as opened:
            found, skipped = exercises.find_submissions(opened, roster=roster)
            assert all(it.path.exists() for it in found)
        assert not found[0].path.exists()
        own = [(it.student, it.n, it.late) for it in found if it.student != "Val Absent"]
        assert own == [(it.student, it.n, it.late) for it in expected]
        assert [(it.n, it.late) for it in found if it.student == "Val Absent"] == [(3, True)]
        assert "uma bell/broken.zip" in [it.path.as_posix() for it in skipped]


def test_an_archive_in_a_folder_is_unpacked_in_a_copy(tmp_path):
    with zipfile.ZipFile(tmp_path / "ana.zip", "w") as archive:
        archive.writestr("exercise-3.py", THREE)
        archive.writestr("../../outside.py", THREE)
    before = sorted(tmp_path.rglob("*"))
    with exercises.open_submissions(tmp_path) as opened:
        found, _ = exercises.find_submissions(opened, 3)
        assert {it.student for it in found} == {"ana"}
        assert all(it.path.resolve().is_relative_to(opened.resolve()) for it in found)
    assert sorted(tmp_path.rglob("*")) == before


def test_one_name_that_the_disk_refuses_does_not_stop_a_class(tmp_path):
    path = tmp_path / "class.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("liana_1_2_" + "a" * 300 + ".py", THREE)
        archive.writestr("royecy_3_4_a.py", THREE)
    with exercises.open_submissions(path) as opened:
        found, _ = exercises.find_submissions(opened)
    assert [it.student for it in found] == ["liana", "royecy"]


def pack(path: Path, files: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_archives_of_any_program_have_the_names_of_the_students(tmp_path):
    path = pack(tmp_path / "class.zip", {"bo\\exercise-3.py": THREE, "Zo__-exercise-3.py": THREE})
    path.write_bytes(path.read_bytes().replace(b"Zo__", "Zoë".encode()))  # as macOS packs it
    with exercises.open_submissions(path) as folder:
        submissions, _ = exercises.find_submissions(folder)
    assert [it.student for it in submissions] == ["bo", "Zoë"]


def test_nothing_in_an_archive_is_overwritten(tmp_path):
    inner = pack(tmp_path / "inner.zip", {"exercise-3.py": THREE}).read_bytes()
    files = {
        "ana/work.zip": inner,
        "ana/work/exercise-3.py": THREE,
        "bo.zip": inner,
        "bo/exercise-3.py": THREE,
    }
    long = {f"{'x' * 300}-exercise-{n}.py": "" for n in (3, 4)}
    with exercises.open_submissions(pack(tmp_path / "class.zip", files | long)) as folder:
        submissions, _ = exercises.find_submissions(folder)
    assert [(it.student[:3], it.n) for it in submissions] == [("ana", 3)] * 2 + [("bo", 3)] * 2 + [
        ("xxx", 3),
        ("xxx", 4),
    ]


def test_an_archive_of_one_student_names_the_student(tmp_path):
    with exercises.open_submissions(pack(tmp_path / "class.zip", {"ana/exercise-3.py": THREE})) as folder:
        ((submission,), _) = exercises.find_submissions(folder)
    assert submission.student == "ana"


def test_a_link_that_leads_nowhere_is_left_out(tmp_path):
    pack(tmp_path / "ana.zip", {"exercise-3.py": THREE})
    (tmp_path / "link.py").symlink_to("nowhere")
    with exercises.open_submissions(tmp_path) as folder:
        ((submission,), _) = exercises.find_submissions(folder)
    assert submission.student == "ana"


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + b"\xff" * 18])
def test_what_is_no_archive_is_refused(content, tmp_path):
    path = write(tmp_path, "class.zip", content)
    with (
        pytest.raises(regard.ArgumentError, match="a folder or a ZIP file"),
        exercises.open_submissions(path),
    ):
        pass


def test_an_archive_that_fills_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.learn.exercises.classroom.MAX_ARCHIVE", 100)
    path = tmp_path / "class.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ana.py", "x" * 101)
    with pytest.raises(regard.ArgumentError, match="101 bytes"), exercises.open_submissions(path):
        pass


@pytest.mark.parametrize(
    ("stem", "number"),
    [
        ("exercise-3", 3), ("Exercise 03 (Ana)", 3), ("ana_ex8", 8), ("03-keys-equal-queries", 3),
        ("ana-exercise_1-v2", 1), ("exercise-12", None), ("final", None), ("2026-03-01", None),
        ("alex2-exercise-3", 3), ("alex2", None), ("Alex 2", None), ("anaexercise3", 3), ("AnaEx3", 3), ("2ex4", 4),
    ],
)  # fmt: skip
def test_the_exercise_is_in_the_name(stem, number):
    match = NUMBER.search(stem)
    assert (int(match[1] or match[2]) if match else None) == number


def test_submissions_are_found_by_folder_or_name(tmp_path):
    names = (
        "alex2-exercise-3.py",
        "Ana/exercise-3.py",
        "Ana/notes.py",
        "ben-exercise-3.py",
        "exercise 3 (Cy).ipynb",
    )
    for name in (*names, ".git/x.py", "a.txt", "folder.py/a.txt"):
        write(tmp_path, name, "")
    found, skipped = exercises.find_submissions(tmp_path)
    assert [(it.student, it.n) for it in found] == [("alex2", 3), ("Ana", 3), ("ben", 3), ("Cy", 3)]
    assert [it.path.as_posix() for it in skipped] == ["Ana/notes.py", "folder.py/a.txt"]
    write(tmp_path, "dee/main.py", "")
    found, _ = exercises.find_submissions(tmp_path, 3)
    assert [(it.student, it.path.name) for it in found if it.path.parent != tmp_path] == [
        ("Ana", "exercise-3.py"),
        ("dee", "main.py"),  # the only file may be the answer, notes beside an answer are not
    ]
    with pytest.raises(regard.ArgumentError, match="regard exercise 3 --class"):
        exercises.find_submissions(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "student", "late"),
    [
        ("Ana García_12345_assignsubmission_file_/hw.py", "Ana García", False),
        ("Ana García_12345_assignsubmission_file/a/b/hw.py", "Ana García", False),
        ("Ana García_12345_assignsubmission_file_hw_1_final.py", "Ana García", False),
        ("Participant_12345_assignsubmission_file_/hw.py", "Participant", False),
        ("Group B_12_assignsubmission_file_/hw.py", "Group B", False),
        ("Default group_assignsubmission_file_/hw.py", "Default group", False),
        ("course/Ana García_12345_assignsubmission_file_/hw.py", "Ana García", False),
        ("garcíaana_12345_67890_hw.py", "garcíaana", False),
        ("garciaana_LATE_12345_67890_hw-2.py", "garciaana", True),
        ("garciaana_late_12345_67890_hw_2024_1_2_x.py", "garciaana", True),
        ("anon_x7Yz2_67890_hw.py", "anon_x7Yz2", False),
        ("LATE_anon_x7Yz2_67890_hw.py", "anon_x7Yz2", True),
        ("garciaana_12345_67890_hw/exercise.py", "garciaana", False),
        ("2024_03_ana.py", "2024_03_ana", False),
        ("exercise-4/ana.py", "ana", False),
        ("ana/exercise-4/main.py", "ana", False),
        ("ana\n/main.py", "ana", False),
        ("Ana_2024_03_01_hw.py", "Ana_2024_03_01_hw", False),
    ],
)
def test_names_of_moodle_and_canvas(name, student, late, tmp_path):
    write_if_allowed(tmp_path, name, THREE)
    ((found,), _) = exercises.find_submissions(tmp_path)
    assert (found.student, found.late, found.n) == (student, late, 3)


def test_blind_marking_and_equal_names_are_told_apart(tmp_path):
    for name in ("Participant_7", "Participant_8", "Ana Li_9", "Ana Li_10", "Cy_11"):
        write(tmp_path, f"{name}_assignsubmission_file_/a.py", THREE)
    found, _ = exercises.find_submissions(tmp_path)
    assert {it.student for it in found} == {"Participant 7", "Participant 8", "Ana Li 9", "Ana Li 10", "Cy"}
    blind = exercises.read_roster(
        write(tmp_path, "r.csv", "Identifier,Status\nParticipant 7,\nParticipant 8,\n")
    )
    found, _ = exercises.find_submissions(tmp_path, roster=blind)
    assert {it.student for it in found} == {"Participant 7", "Participant 8", "Ana Li 9", "Ana Li 10", "Cy"}


def test_packages_that_a_student_packed_are_not_read(tmp_path):
    for folder in ("venv/lib", "lib/site-packages/x", "node_modules", ".venv", "__pycache__"):
        write(tmp_path, f"ana/{folder}/exercise-3.py", THREE)
    write(tmp_path, "ana/exercise-3.py", HALF)
    found, skipped = exercises.find_submissions(tmp_path)
    assert (len(found), skipped) == (1, [])


# -- The exercise that a file answers ----------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, len(EXERCISES) + 1))
def test_a_file_of_any_name_is_matched_by_what_it_answers(n, tmp_path):
    texts = {
        "solution": exercises.solution(n).code,
        "starter": exercises.starter(n),
        "names": "\n".join(f"{part.name} = 1" for part in EXERCISES[n - 1].parts),
        "functions": "\n".join(f"def {part.name}(x): return x" for part in EXERCISES[n - 1].parts),
        "mention": f"# Exercise {n}. My work\nx = 1",
        "checked": f"from regard.learn import exercises\nexercises.check({n}, 1)",
        "broken": exercises.starter(n) + "\nif (:\n",
    }
    for name, text in texts.items():
        assert find_exercises(write(tmp_path, "hw_final_v2.py", text)) == {n}, name
        assert find_exercises(write(tmp_path, "hw_final_v2.ipynb", make_notebook("%pip x", text))) == {n}, (
            name
        )


def test_the_answer_decides_before_the_name_of_the_file(tmp_path):
    def find(text, named):
        return find_exercises(write(tmp_path, "x.py", text), named)

    assert find(MASKS, 3) == {6}
    assert find(THREE + MASKS, None) == {3, 6}
    assert find("answer = {'scale': 1}", 3) == {3}  # one wrong name decides nothing
    assert find("scores = scaled = 1\nweights = 2\noutput = 3", 2) == {2}  # steps on the way
    assert find("weights = 1", None) == set()  # of four exercises
    assert find("x = 1", None) == find("", None) == set()
    assert find("def f(): return f()\nanswer = f()", None) == set()


# -- Rosters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "name,id\nAna García,1\nBen Li,2\n",
        "Name;Matriculation number\nAna García;1\nBen Li;2\n",
        "First name,Last name,ID number,Email address\nAna,García,1,a@x.org\nBen,Li,2,b@x.org\n",
        "Surname\tFirst name\tUsername\nGarcía\tAna\t1\nLi\tBen\t2\n",
        "Identifier,Full name,Email address,Status\nParticipant 1,Ana García,a@x.org,\nParticipant 2,Ben Li,b@x.org,\n",
        '\nStudent,ID,SIS User ID,Section,Homework (99)\n"    Points Possible",,,,10\n"García, Ana",1,s1,A,5\n'
        '"Li, Ben",2,s2,A,\n"Student, Test",3,,A,\n',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_rosters_of_moodle_canvas_and_spreadsheets(text, encoding, tmp_path):
    students = exercises.read_roster(write(tmp_path, "roster.csv", text.encode(encoding)))
    assert [match_student(*label, students) for label in (("García, Ana", ""), ("liben", ""))] == list(
        students
    )
    assert [match_student("?", key, students) for key in ("1", "2", "3")] == [*students, None]
    assert [student.id for student in students] == ["1", "2"]


def test_a_roster_of_one_column_needs_no_header(tmp_path):
    students = exercises.read_roster(write(tmp_path, "roster.txt", "Ana García\r\n\r\nBen Li\r\n"))
    assert students == (Student("Ana García"), Student("Ben Li"))


def test_students_of_one_name_are_told_apart_by_id(tmp_path):
    students = exercises.read_roster(write(tmp_path, "r.csv", "name,id\nAna Li,1\nAna Li,2\n"))
    assert [student.name for student in students] == ["Ana Li (1)", "Ana Li (2)"]
    assert (
        match_student("Ana Li", "2", students) == students[1]
        and match_student("Ana Li", "", students) is None
    )


@pytest.mark.parametrize(
    "text", ["", "\n", "a,b\n1,2\n", "name\n", "name,id\nAna,\nAna,\n", "PK\x03\x04,\x00\n1,2", "PK\x00\n1"]
)
def test_a_roster_without_names_is_refused(text, tmp_path):
    with pytest.raises(regard.ArgumentError, match="a column name"):
        exercises.read_roster(write(tmp_path, "r.csv", text))


@pytest.mark.parametrize(
    ("label", "key", "name"),
    [
        ("Ana María García", "", "Ana María García"), ("garciaanamaria", "", "Ana María García"),
        ("García Ana María", "", "Ana María García"), ("ana", "", "Ana María García"),
        ("x", "1001", "Ana María García"), ("ana.garcia", "", "Ana María García"),
        ("obrienben", "", "Ben O'Brien"), ("ben_hw_final_v2", "", "Ben O'Brien"),
        ("DAE JUNG CHO", "", "Cho, Dae-Jung"), ("Muller Dee", "", "Dee Müller"), ("hlund", "", "Ivy Lund"),
        ("Ben Schmidt", "", None), ("eve_1005_v2", "", "Eve Adams"),
        ("hw_final_v2", "", None), ("1005", "", "Eve Adams"), ("", "", None),
    ],
)  # fmt: skip
def test_names_are_matched_in_any_order_and_spelling(label, key, name, roster):
    found = match_student(label, key, roster)
    assert (found and found.name) == name


# -- Results -----------------------------------------------------------------------------------------------


def make_row(student: str, n: int, right: int, *hints: str) -> CheckedSubmission:
    parts = tuple(part.name for part in EXERCISES[n - 1].parts)
    status = "right" if right == len(parts) else "not yet"
    result = SubmissionResult(status, hints, "", parts[:right], len(parts), 0.1)
    return CheckedSubmission(Submission(student, n, Path(f"{student}-{n}.py")), result)


def test_a_student_without_a_name_gets_no_files():
    assert match_student("zed", "", (Student("-"), Student("Ana"))) is None


def test_the_name_of_an_answer_tells_its_exercise(tmp_path):
    text = (
        "answer_3: dict = {'itself': False}\nanswer_5 = {'variance': 1, 'scale': 1}\nanswer_2 = {'merge': 1}"
    )
    assert find_exercises(write(tmp_path, "a.py", text)) == {3, 5}


def test_points_add_up_to_the_maximum():
    points = {3: 0.1, 5: 3.333, 7: 0.2}
    rows = tuple(
        CheckedSubmission(
            Submission("ana", n, Path("a.py")),
            SubmissionResult("right", (), "", names, len(names), 1.0),
        )
        for n in points
        for names in [tuple(part.name for part in EXERCISES[n - 1].parts)]
    )
    report = ClassReport(rows, points=points)
    assert report.count_points("ana") == report.count_maximum() == 3.63


def test_the_better_of_two_files_counts():
    rows = (
        make_row("ana", 6, 1, "causal: a", "both: b"),
        make_row("ana", 6, 2, "both: b"),
        make_row("ben", 6, 3),
    )
    report = ClassReport(rows, (Student("ben"), Student("cy")), points={6: 10})
    assert [report.count_points(name) for name in report.students] == [6.67, 10, 0]
    assert report.count_hints() == [(1, 6, "both: b")]
    assert (report.absent, report.strangers) == (("cy",), ("ana",))
    assert report.get_maximum(6) == 10 and ClassReport(rows).get_maximum(6) == 3
    assert ClassReport(rows).strangers == ()


def test_each_hint_of_an_answer_is_counted():
    rows = (make_row("ana", 6, 0, "causal: a", "both: b"), make_row("ben", 6, 0, "both: b"))
    assert ClassReport(rows).count_hints() == [(2, 6, "both: b"), (1, 6, "causal: a")]


@pytest.mark.parametrize("name", ["caf\udce9", "\x1b[31mred", "<script>"])
def test_any_name_can_be_in_the_report(name, tmp_path):
    write_if_allowed(tmp_path, f"{name}/exercise-3.py", HALF)
    submissions, _ = exercises.find_submissions(tmp_path)
    report = exercises.check_class(submissions)
    assert report.rows[0].result.summary == "2/4"
    report.page().save(tmp_path / "page.html")
    assert "<script>/" not in report.page().html and report.students[0].encode()
