//! The parts of a nightly run: together they run every test of the repository. Benchmarks are no part of it.

/// A part: one command, one row of the table.
pub struct Part {
    pub name: &'static str,
    /// What it tests, in a few words.
    pub about: &'static str,
    /// A command of bash, run in the repository's root.
    pub command: &'static str,
    /// It is ended, and has failed, after so many minutes.
    pub minutes: u32,
    /// The document that gives the reason of each test that the command counts as excepted.
    pub reasons: Option<&'static str>,
}

const fn part(name: &'static str, about: &'static str, command: &'static str, minutes: u32) -> Part {
    Part {
        name,
        about,
        command,
        minutes,
        reasons: None,
    }
}

const fn suite(
    name: &'static str,
    about: &'static str,
    command: &'static str,
    reasons: &'static str,
) -> Part {
    Part {
        reasons: Some(reasons),
        ..part(name, about, command, 420)
    }
}

/// All of them, in the order in which they run: those first that stand on nothing but the tree.
pub const PARTS: &[Part] = &[
    part("lint", "formatting and clippy", "make lint", 60),
    part(
        "advisories",
        "licences, bans, sources and security advisories of every dependency",
        "make deny && tests/advisories --part",
        30,
    ),
    part("unit", "unit, property and tiny-guest tests", "make unit", 120),
    part(
        "e2e",
        "every end-to-end test, the long ones too, and those of the VMM that boot Linux",
        "make e2e ALL=yes",
        720,
    ),
    part("demo", "the README's demo", "make demo", 60),
    part(
        "package",
        "the Debian package and the Kubernetes node image: installed, used, removed",
        "make test-package",
        90,
    ),
    part(
        "quickstart",
        "the walk-throughs of the documents, typed",
        "make test-quickstart",
        60,
    ),
    part(
        "release",
        "a release, packed twice, compared, and read by its tools",
        "make test-release",
        60,
    ),
    part(
        "lab",
        "the lab's and the test images' tests of themselves",
        "make test-lab",
        60,
    ),
    part(
        "fuzz",
        "every fuzz target",
        "make fuzz MINUTES=${MINUTES:-1}",
        720,
    ),
    part(
        "interop",
        "forms of other tools, made and read by their Go libraries",
        "tests/interop/run",
        60,
    ),
    part(
        "push",
        "an image pushed to Debian's docker-registry",
        "tests/interop/push",
        30,
    ),
    part(
        "soci",
        "ztocs made and read by SOCI's own tools",
        "tests/interop/soci/run",
        60,
    ),
    part(
        "nydus",
        "images made by nydus-image",
        "tests/interop/nydus/test",
        60,
    ),
    part(
        "api",
        "the OpenAPI document, by Schemathesis and by a generated client",
        "make test-api",
        120,
    ),
    part(
        "e2b",
        "E2B's SDKs for Python and JavaScript, unchanged, over fakes and with real guests",
        "make test-e2b",
        60,
    ),
    suite(
        "containerd",
        "containerd's own client suite, with runc and with Thaw",
        "make test-containerd",
        "containerd-suite.md",
    ),
    suite(
        "kubernetes",
        "pods of Kubernetes on one node, with runc and with Thaw",
        "make test-k8s",
        "kubernetes-suite.md",
    ),
    part(
        "soak",
        "24,000 creations of a tiny guest; 1,000 thaws of Linux, 100 at once, 100 clones",
        "make soak",
        720,
    ),
    part(
        "upgrade",
        "sandboxes and containers of the previous release under this one, and back",
        "make test-upgrade LINUX=yes",
        120,
    ),
];

/// The part of that name.
pub fn named(name: &str) -> Option<&'static Part> {
    PARTS.iter().find(|part| part.name == name)
}
