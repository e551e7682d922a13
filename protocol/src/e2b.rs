//! E2B's in-sandbox protocol, generated from `protocol/proto/e2b`, with the JSON mapping of proto3.
//!
//! thawd serves it over the Connect protocol ([`crate::connect`]) and HTTP. Nothing of it is in the guest.

use std::sync::LazyLock;

use prost::{DecodeError, Message, Name};
use prost_reflect::{DescriptorPool, DeserializeOptions, DynamicMessage, MessageDescriptor};

/// `process`.
#[allow(missing_docs, clippy::all, rustdoc::all)]
pub mod process {
    include!(concat!(env!("OUT_DIR"), "/process.rs"));
}

/// `filesystem`.
#[allow(missing_docs, clippy::all, rustdoc::all)]
pub mod filesystem {
    include!(concat!(env!("OUT_DIR"), "/filesystem.rs"));
}

/// The fields of every message.
static DESCRIPTORS: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let bytes: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/e2b.descriptors"));
    DescriptorPool::decode(bytes).expect("the build script wrote descriptors")
});

/// Why JSON is not a message, or a message has no JSON.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("{0}")]
    Message(#[from] DecodeError),
}

fn descriptor<M: Name>() -> MessageDescriptor {
    let descriptor = DESCRIPTORS.get_message_by_name(&M::full_name());
    descriptor.expect("messages and descriptors are made of the same files")
}

/// A message from JSON. Unknown fields are ignored, so that newer clients are understood.
///
/// # Errors
/// It is not JSON, or not that of such a message.
pub fn from_json<M: Message + Name + Default>(json: &[u8]) -> Result<M, JsonError> {
    let options = DeserializeOptions::new().deny_unknown_fields(false);
    let mut source = serde_json::Deserializer::from_slice(json);
    let message = DynamicMessage::deserialize_with_options(descriptor::<M>(), &mut source, &options)?;
    source.end()?;
    Ok(message.transcode_to()?)
}

/// A message as JSON.
///
/// # Errors
/// A time is outside of what JSON can express.
pub fn to_json<M: Message + Name>(message: &M) -> Result<Vec<u8>, JsonError> {
    let mut fields = DynamicMessage::new(descriptor::<M>());
    fields.transcode_from(message)?;
    Ok(serde_json::to_vec(&fields)?)
}

#[cfg(test)]
mod tests {
    use super::filesystem::{EntryInfo, FileType};
    use super::process::{ProcessEvent, Signal, StartRequest, StartResponse, process_event};
    use super::*;

    fn json<M: Message + Name>(message: &M) -> String {
        String::from_utf8(to_json(message).unwrap()).unwrap()
    }

    #[test]
    fn messages_have_the_json_of_proto3() {
        let output = process_event::data_event::Output::Stdout(vec![0xff, 0]);
        let data = process_event::DataEvent { output: Some(output) };
        let message = StartResponse {
            event: Some(ProcessEvent {
                event: Some(process_event::Event::Data(data)),
            }),
        };
        assert_eq!(json(&message), r#"{"event":{"data":{"stdout":"/wA="}}}"#);
        let entry = EntryInfo {
            name: "x".into(),
            r#type: FileType::Directory.into(),
            size: 1 << 40,
            modified_time: Some(prost_types::Timestamp {
                seconds: 1,
                nanos: 500_000_000,
            }),
            is_symlink: true,
            ..EntryInfo::default()
        };
        assert_eq!(
            json(&entry),
            r#"{"name":"x","type":"FILE_TYPE_DIRECTORY","size":"1099511627776","modifiedTime":"1970-01-01T00:00:01.500Z","isSymlink":true}"#
        );
        assert_eq!(from_json::<EntryInfo>(json(&entry).as_bytes()).unwrap(), entry);
    }

    #[test]
    fn json_of_newer_clients_is_understood() {
        let text = br#"{"process":{"cmd":"/bin/sh","args":["-c"],"envs":{"A":"1"},"cwd":null},"stdin":false,"later":{"a":[1]}}"#;
        let request: StartRequest = from_json(text).unwrap();
        let process = request.process.unwrap();
        assert_eq!((process.cmd.as_str(), process.cwd), ("/bin/sh", None));
        assert_eq!((process.envs["A"].as_str(), request.stdin), ("1", Some(false)));
        for bad in ["", "[]", "{", "{} {}", r#"{"process":1}"#, r#"{"stdin":"x"}"#] {
            assert!(from_json::<StartRequest>(bad.as_bytes()).is_err(), "{bad}");
        }
        let deep = format!("{}{}", r#"{"later":"#.repeat(10_000), "}".repeat(10_000));
        assert!(from_json::<StartRequest>(deep.as_bytes()).is_err());
        assert_eq!(Signal::Sigkill as i32, 9);
    }
}
