use super::super::PausedSandboxes;
use super::super::tests::record;
use super::*;

fn paused(data: &Path) -> Paused {
    let draft = PausedSandboxes::under(data).begin("0123456789ab").unwrap();
    fs::create_dir(draft.snapshot()).unwrap();
    let running = tempfile::tempdir().unwrap();
    fs::write(running.path().join(journal::FILE), b"output").unwrap();
    fs::write(running.path().join(crate::container::LIFE_FILE), b"{}").unwrap();
    let mut record = record("0123456789ab", None, false);
    record.cgroup = Some("thaw".into());
    draft.finish(record, running.path()).unwrap()
}

fn note() -> Copied {
    Copied {
        claim: "registry.example/paused:0123456789ab.c".into(),
        nonce: "n".into(),
        is_complete: false,
    }
}

#[test]
fn copy_has_the_record_and_small_files_and_no_output() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let paused = paused(here.path());
    let portable: Portable = serde_json::from_str(&paused.portable("claim").unwrap()).unwrap();
    assert_eq!(portable.claim, "claim");
    let record = portable.record();
    assert_eq!(
        (record.id.as_str(), record.cgroup, record.vmm),
        ("0123456789ab", None, None)
    );
    assert_eq!(record.terms.labels, paused.record().terms.labels);
    assert!(record.terms.time_limit().timeout.is_none());
    portable.unpack(there.path(), &note()).unwrap();
    let read = |name: &str| fs::read(there.path().join(name)).unwrap();
    assert_eq!(read(journal::FILE), b"");
    assert_eq!(read(crate::container::LIFE_FILE), b"{}");
    let evil = Portable {
        files: [("../evil".to_owned(), String::new())].into(),
        ..portable
    };
    assert!(evil.unpack(there.path(), &note()).is_err());
}

#[test]
fn note_stays_until_it_is_removed() {
    let data = tempfile::tempdir().unwrap();
    let paused = paused(data.path());
    assert_eq!(paused.copied().unwrap(), None);
    paused.note_copied(&note()).unwrap();
    let found = PausedSandboxes::under(data.path()).find("0123456789ab").unwrap();
    assert_eq!(found.copied().unwrap(), Some(note()));
    found.note_complete().unwrap();
    assert!(paused.copied().unwrap().unwrap().is_complete);
    fs::write(paused.directory().join(NOTE), b"{").unwrap();
    assert!(paused.copied().is_err(), "a damaged note is not taken for none");
    paused.forget_copied().unwrap();
    paused.forget_copied().unwrap();
    paused.note_complete().unwrap();
    assert_eq!(paused.copied().unwrap(), None);
}
