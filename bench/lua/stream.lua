-- The same, streamed.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local system = string.rep("You are a helpful assistant. ", 40)
wrk.body = '{"model":"m","messages":[{"role":"system","content":"' .. system .. '"},{"role":"user","content":"hi there"}],"stream":true}'
