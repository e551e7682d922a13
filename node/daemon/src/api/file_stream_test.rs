use super::*;
use crate::api::fake::FakeFiles;

#[tokio::test]
async fn a_file_that_changes_under_the_reader_breaks_the_answer_off() {
    let files = Arc::new(FakeFiles::default());
    let upload = Upload {
        path: "/a".into(),
        name: "u".into(),
        kind: UploadKind::File { mode: 0o644 },
    };
    files.write(&upload, 0, vec![1; 10], true).await.unwrap();
    let mut reading = OpenDownload {
        files: files.clone(),
        path: "/a".into(),
        identity: 7,
        mode: 0o640,
        size: Some(20),
        at: 0,
        next: Some(files.read("/a", 0, 0).await.unwrap()),
    };
    assert_eq!(reading.next().await.unwrap().unwrap().len(), 10);
    assert!(reading.next().await.unwrap().is_err());
    // A file that grew is sent with the announced length.
    (reading.at, reading.size) = (4, Some(6));
    reading.next = Some(files.read("/a", 0, 0).await.unwrap());
    assert_eq!(reading.next().await.unwrap().unwrap().len(), 2);
    assert!(reading.next().await.is_none());
}
