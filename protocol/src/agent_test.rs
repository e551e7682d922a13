//! The bytes on the wire, as Kata's runtime and agent send them. Field numbers and types are written by hand here, so that
//! a mistake in `proto/` fails a test.

use super::agent::*;
use super::*;

/// `number << 3 | wire type`, then the payload.
fn bytes(number: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2, payload.len() as u8];
    out.extend_from_slice(payload);
    out
}

fn varint(number: u8, value: u8) -> Vec<u8> {
    vec![number << 3, value]
}

fn create_container_request() -> CreateContainerRequest {
    CreateContainerRequest {
        container_id: "c".into(),
        exec_id: "e".into(),
        storages: vec![Storage {
            driver: "virtio-fs".into(),
            driver_options: vec!["o".into()],
            source: "s".into(),
            fstype: "t".into(),
            options: vec!["ro".into()],
            mount_point: "/m".into(),
            ..Default::default()
        }],
        OCI: MessageField::some(oci::Spec {
            Process: MessageField::some(oci::Process {
                Terminal: true,
                User: MessageField::some(oci::User {
                    UID: 1,
                    Username: "u".into(),
                    ..Default::default()
                }),
                Args: vec!["a".into()],
                Cwd: "/".into(),
                NoNewPrivileges: true,
                ..Default::default()
            }),
            Root: MessageField::some(oci::Root {
                Path: "/r".into(),
                Readonly: true,
                ..Default::default()
            }),
            Linux: MessageField::some(oci::Linux {
                CgroupsPath: "/g".into(),
                Namespaces: vec![oci::LinuxNamespace {
                    Type: "pid".into(),
                    ..Default::default()
                }],
                ..Default::default()
            }),
            ..Default::default()
        }),
        sandbox_pidns: true,
        stdout_port: 9,
        ..Default::default()
    }
}

/// [`create_container_request`] as Kata encodes it.
fn create_container_bytes() -> Vec<u8> {
    let storage = [
        bytes(1, b"virtio-fs"),
        bytes(2, b"o"),
        bytes(3, b"s"),
        bytes(4, b"t"),
        bytes(5, b"ro"),
        bytes(6, b"/m"),
    ]
    .concat();
    let user = [varint(1, 1), bytes(4, b"u")].concat();
    let process = [
        varint(1, 1),
        bytes(3, &user),
        bytes(4, b"a"),
        bytes(6, b"/"),
        varint(9, 1),
    ]
    .concat();
    let root = [bytes(1, b"/r"), varint(2, 1)].concat();
    let linux = [bytes(5, b"/g"), bytes(6, &bytes(1, b"pid"))].concat();
    let spec = [bytes(2, &process), bytes(3, &root), bytes(8, &linux)].concat();
    [
        bytes(1, b"c"),
        bytes(2, b"e"),
        bytes(5, &storage),
        bytes(6, &spec),
        varint(7, 1),
        varint(10, 9),
    ]
    .concat()
}

#[test]
fn create_container_is_encoded_as_kata_encodes_it() {
    let (request, expected) = (create_container_request(), create_container_bytes());
    assert_eq!(request.write_to_bytes().unwrap(), expected);
    assert_eq!(
        CreateContainerRequest::parse_from_bytes(&expected).unwrap(),
        request
    );
}

#[test]
fn unusual_field_numbers_are_encoded() {
    let reseed = ReseedRandomDevRequest {
        data: vec![7],
        ..Default::default()
    };
    assert_eq!(
        reseed.write_to_bytes().unwrap(),
        bytes(2, &[7]),
        "its only field is number 2"
    );
    let group = FSGroup {
        group_id: 5,
        ..Default::default()
    };
    assert_eq!(
        group.write_to_bytes().unwrap(),
        varint(2, 5),
        "there is no field 1"
    );
    let time = SetGuestDateTimeRequest {
        Sec: 1,
        Usec: 2,
        ..Default::default()
    };
    assert_eq!(
        time.write_to_bytes().unwrap(),
        [varint(1, 1), varint(2, 2)].concat()
    );
    let config = MemAgentMemcgConfig {
        disabled: Some(false),
        ..Default::default()
    };
    assert_eq!(
        config.write_to_bytes().unwrap(),
        varint(1, 0),
        "absent and false are two things"
    );
    let copy = CopyFileRequest {
        path: "/p".into(),
        uid: -1,
        data: vec![1],
        ..Default::default()
    };
    let minus_one = [5 << 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    let expected = [bytes(1, b"/p"), minus_one.to_vec(), bytes(8, &[1])].concat();
    assert_eq!(copy.write_to_bytes().unwrap(), expected);
}
