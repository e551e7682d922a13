use super::*;

const SECRET: &str = "planted-secret";

/// Every file of an archive, in one text.
fn unpacked(archive: &[u8]) -> String {
    let mut text = String::new();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive));
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        text += &format!("{}\n", entry.path().unwrap().display());
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        text += &String::from_utf8_lossy(&bytes);
    }
    text
}

fn collected(run: &Path, with_output: bool) -> String {
    let mut bytes = Vec::new();
    let mut bundle = Bundle::new(&mut bytes, 1);
    sandboxes(&mut bundle, run, with_output).unwrap();
    bundle.finish().unwrap();
    unpacked(&bytes)
}

#[test]
fn bundle_has_no_planted_secret() {
    let run = tempfile::tempdir().unwrap();
    let of = run.path().join("abc");
    std::fs::create_dir(&of).unwrap();
    let record =
        serde_json::json!({"id": "abc", "command": ["x", SECRET], "environment": {"A": SECRET}, "vcpus": 2});
    std::fs::write(of.join("record.json"), record.to_string()).unwrap();
    std::fs::write(of.join("vmm.log"), "started\n").unwrap();
    std::fs::write(of.join("output"), SECRET).unwrap();
    // A link out of the directory is not followed.
    std::fs::write(run.path().join("elsewhere"), SECRET).unwrap();
    std::os::unix::fs::symlink(run.path().join("elsewhere"), of.join("share.log")).unwrap();
    let text = collected(run.path(), false);
    assert!(!text.contains(SECRET), "{text}");
    assert!(text.contains("started") && text.contains("\"vcpus\": 2") && text.contains("MANIFEST.txt"));
    assert!(
        collected(run.path(), true).contains(SECRET),
        "output is there if it is asked for"
    );
}

#[test]
fn config_shows_numbers_and_hides_texts() {
    let text = format!(
        "[api]\nlisten = \"127.0.0.1:1\"\ntokens = \"/{SECRET}\"\n[pools]\nmakers = 7\n[[fetch.mirrors.\"docker.io\"]]\n\
         url = \"https://u:{SECRET}@m.example\"\nheaders = {{ limit = \"{SECRET}\" }}\nnew_key = [\"{SECRET}\"]\n"
    );
    let shown = String::from_utf8(redact::config(text.as_bytes()).unwrap()).unwrap();
    assert!(!shown.contains(SECRET), "{shown}");
    assert!(
        shown.contains("127.0.0.1:1") && shown.contains("makers = 7"),
        "{shown}"
    );
    let broken = redact::config(format!("token = {SECRET}").as_bytes()).unwrap_err();
    assert!(!broken.contains(SECRET), "{broken}");
}

#[test]
fn mounts_have_no_options() {
    let line = format!("36 35 98:0 / /mnt rw,noatime shared:1 - cifs //{SECRET}/x rw,password={SECRET}\n");
    assert_eq!(redact::mounts(line.as_bytes()), b"/mnt cifs\n");
}

#[test]
fn file_is_bounded_from_its_end() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![b'a'; MOST_OF_FILE as usize]).unwrap();
    file.write_all(b"end").unwrap();
    let bytes = tail(file.path()).unwrap();
    assert_eq!(bytes.len() as u64, MOST_OF_FILE);
    assert!(bytes.ends_with(b"end"));
}

#[test]
fn full_archive_leaves_files_out() {
    let mut bytes = Vec::new();
    let mut bundle = Bundle::new(&mut bytes, 1);
    bundle.left = 3;
    bundle.add("large", Ok(vec![0; 4])).unwrap();
    bundle.add("small", Ok(vec![0; 3])).unwrap();
    bundle.finish().unwrap();
    let text = unpacked(&bytes);
    assert!(
        text.contains("large: none: left out") && text.contains("thaw-debug/small"),
        "{text}"
    );
}
