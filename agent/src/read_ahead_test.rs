use super::*;

fn options(of: &[&str]) -> Result<Option<u32>> {
    let owned: Vec<String> = of.iter().map(|option| (*option).to_owned()).collect();
    of_options(&owned)
}

#[test]
fn limit_is_found_among_other_driver_options() {
    assert_eq!(options(&[]).unwrap(), None);
    assert_eq!(options(&["fill-disk", "a=b"]).unwrap(), None);
    assert_eq!(options(&["fill-disk", "read-ahead-kib=512"]).unwrap(), Some(512));
}

#[test]
fn limit_that_is_no_number_is_refused() {
    for bad in ["read-ahead-kib=", "read-ahead-kib=1M", "read-ahead-kib=-1"] {
        let error = options(&[bad]).unwrap_err().to_string();
        assert!(error.contains(bad), "{error}");
    }
}

#[test]
fn limit_is_written_for_the_device_of_the_file_system() {
    let devices = tempfile::tempdir().unwrap();
    let limit = devices.path().join("0:45/read_ahead_kb");
    fs::create_dir(devices.path().join("0:45")).unwrap();
    fs::write(&limit, "128\n").unwrap();
    set_of(devices.path(), rustix::fs::makedev(0, 45), 1024).unwrap();
    assert_eq!(fs::read_to_string(&limit).unwrap(), "1024");
    let missing = set_of(devices.path(), rustix::fs::makedev(8, 1), 1024).unwrap_err();
    assert!(missing.to_string().contains("8:1/read_ahead_kb"), "{missing}");
}
